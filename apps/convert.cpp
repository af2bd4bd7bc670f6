#include <fmt/format.h>

#include "apps/commands.h"
#include "titanium/formats/gguf_to_hf.h"
#include "titanium/report/format.h"

namespace titanium {

void add_convert(CLI::App& app, Run& run) {
  struct Flags {
    std::string gguf, folder, dtype = "bfloat16";
  };
  auto flags = std::make_shared<Flags>();
  CLI::App* command = app.add_subcommand("convert", "GGUF file -> Hugging Face folder");
  command->add_option("model.gguf", flags->gguf, "the GGUF file")->required()->check(not_empty());
  command->add_option("out_dir", flags->folder, "the folder to make")->required()->check(not_empty());
  command->add_option("--dtype", flags->dtype, "of the stored weights")
      ->check(CLI::IsMember({"bfloat16", "float32"}))
      ->capture_default_str();
  command->callback([flags, &run] {
    run = [flags] {
      ConvertOptions options;
      options.dtype = flags->dtype == "float32" ? Dtype::F32 : Dtype::BF16;
      const ConvertReport report = convert_gguf(flags->gguf, flags->folder, options);
      fmt::print("{}: {} tensors ({}), config.json, tokenizer\n", flags->folder, report.tensors,
                 human_bytes(report.bytes));
      return 0;
    };
  });
}

}  // namespace titanium
