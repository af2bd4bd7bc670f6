// Any bytes as a data file: every record is taken, or refused by a BadRecord that names its line.
#include <cstdint>
#include <cstdlib>
#include <string_view>

#include "titanium/data/jsonl.h"
#include "titanium/data/record.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using titanium::RecordForm;
  constexpr int64_t kVocab = 1000;
  const auto file = titanium::JsonlFile::from_text({reinterpret_cast<const char*>(data), size}, "fuzz.jsonl");
  for (int64_t i = 0; i < file.size(); ++i) {
    const std::string where = file.where(i);
    for (RecordForm form : {RecordForm::kAuto, RecordForm::kMessages, RecordForm::kPromptResponse,
                            RecordForm::kText, RecordForm::kInputIds}) {
      try {
        const titanium::Record record = titanium::parse_record(file.line(i), form, kVocab, where);
        if (record.form == RecordForm::kAuto || record.ids.size() != record.loss_mask.size()) std::abort();
        for (int32_t id : record.ids) {
          if (id < 0 || id >= kVocab) std::abort();
        }
        for (const auto& message : record.messages) {
          if (!message.at("role").is_string()) std::abort();
        }
      } catch (const titanium::BadRecord& e) {
        if (!std::string_view(e.what()).starts_with(where)) std::abort();
      }
    }
  }
  return 0;
}
