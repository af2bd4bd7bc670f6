// Runs the tree of a template.
#pragma once
#include <string>
#include <vector>

#include "titanium/text/template_ast.h"
#include "titanium/text/template_builtins.h"

namespace titanium::jinja {

// `variables` are what the template starts with.
RenderedChat render(const Tree& tree, Run& run, std::vector<std::pair<std::string, Value>> variables);

}  // namespace titanium::jinja
