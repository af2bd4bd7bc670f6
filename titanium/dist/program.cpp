#include "titanium/dist/program.h"

#include <elf.h>
#include <fmt/format.h>
#include <link.h>

#include <cstring>
#include <filesystem>
#include <string_view>

namespace titanium {
namespace {

// What the linker wrote of the contents; "unknown" where it was told not to.
std::string build_id(const dl_phdr_info& object) {
  const auto padded = [](size_t bytes) { return (bytes + 3) / 4 * 4; };
  for (int i = 0; i < object.dlpi_phnum; ++i) {
    const auto& segment = object.dlpi_phdr[i];
    if (segment.p_type != PT_NOTE) continue;
    const auto* at = reinterpret_cast<const char*>(object.dlpi_addr + segment.p_vaddr);
    const char* const end = at + segment.p_memsz;
    while (end - at > static_cast<std::ptrdiff_t>(sizeof(ElfW(Nhdr)))) {
      ElfW(Nhdr) head;
      std::memcpy(&head, at, sizeof head);
      const char* const name = at + sizeof head;
      const char* const value = name + padded(head.n_namesz);
      if (head.n_type == NT_GNU_BUILD_ID &&
          std::string_view(name, head.n_namesz) == std::string_view("GNU", 4)) {
        std::string text;
        for (size_t b = 0; b < head.n_descsz; ++b)
          text += fmt::format("{:02x}", static_cast<unsigned char>(value[b]));
        return text;
      }
      at = value + padded(head.n_descsz);
    }
  }
  return "unknown";
}

}  // namespace

std::string program_identity() {
  std::string text;
  const auto add = [](dl_phdr_info* object, size_t, void* into) {
    std::string& text = *static_cast<std::string*>(into);
    const std::string name = std::filesystem::path(object->dlpi_name).filename().string();
    if (text.empty()) {  // the program comes first
      text = fmt::format("build {}\n", build_id(*object));
    } else if (name.starts_with("libtorch") || name.starts_with("libc10")) {
      text += fmt::format("{}, build {}\n", name, build_id(*object));
    }
    return 0;
  };
  ::dl_iterate_phdr(add, &text);
  return text;
}

}  // namespace titanium
