// The tree of a chat template.
#pragma once
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "titanium/text/template_value.h"

namespace titanium::jinja {

struct Expr;
using ExprPtr = std::unique_ptr<const Expr>;

struct Arguments {
  std::vector<ExprPtr> positional;
  std::vector<std::pair<std::string, ExprPtr>> named;
};

struct Expr {
  enum class Kind {
    kConst,      // value
    kName,       // name
    kList,       // children
    kTuple,      // children
    kDict,       // children: key, value, key, value, ...
    kAttribute,  // children[0].name
    kItem,       // children[0][children[1]]
    kSlice,      // children[0][children[1]:children[2]:children[3]]; a missing part is null
    kCall,       // children[0](arguments)
    kFilter,     // children[0]|name(arguments); children[0] is null in a filter block
    kTest,       // children[0] is name(arguments)
    kNot,
    kNegate,
    kPlus,
    kAnd,
    kOr,
    kIf,       // children[1] if children[0] else children[2], which may be null
    kConcat,   // children joined as text
    kBinary,   // children[0] name children[1]; name is one of + - * / // % **
    kCompare,  // children[0] names[0] children[1] names[1] children[2] ...
  };
  Kind kind = Kind::kConst;
  int line = 0;
  int depth = 1;
  Value value;
  std::string name;
  std::vector<std::string> names;
  std::vector<ExprPtr> children;
  Arguments arguments;
};

struct Statement;
using Body = std::vector<std::unique_ptr<const Statement>>;

// Where an assignment or a loop puts values.
struct Target {
  std::vector<std::string> names;  // more than one: unpacked
  bool unpack = false;             // also for one name with a comma
  std::string attribute;           // of a namespace: set names[0].attribute
};

struct Statement {
  enum class Kind {
    kText,        // text
    kPrint,       // expr
    kIf,          // branches, then otherwise
    kFor,         // for target in expr if condition: body, else otherwise
    kSet,         // target = expr
    kSetBlock,    // target = body, through filters
    kFilter,      // body through filters
    kMacro,       // name(parameters): body
    kGeneration,  // body
    kBreak,
    kContinue,
  };
  Kind kind = Kind::kText;
  int line = 0;
  std::string text;  // of kText; name of kMacro
  ExprPtr expr, condition;
  std::vector<std::pair<ExprPtr, Body>> branches;
  Target target;
  Body body, otherwise;
  std::vector<std::pair<std::string, ExprPtr>> parameters;  // with default, or null
};

struct Tree {
  Body body;
  bool generation = false;
};

// BadConfig with name and line.
Tree parse(std::string_view source, const std::string& name);

}  // namespace titanium::jinja
