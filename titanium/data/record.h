// One JSON object of a data file, checked.
#pragma once
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "titanium/base/error.h"
#include "titanium/text/chat_template.h"

namespace titanium {

// What a record may be.  With kAuto a record that has the fields of two forms, or of none, is refused; with
// any other only that form's fields count.  Further fields are ignored (but for labels and attention_mask
// beside input_ids, which would change the meaning), and a field that is null is absent.
enum class RecordForm {
  kAuto,            // any of the below, record by record
  kMessages,        // "messages": [{"role", "content"}, ...], and "tools" where the template knows them
  kPromptResponse,  // "prompt": a text, or a list of messages; "response": a text
  kText,            // "text"
  kInputIds,  // "input_ids": [int, ...], and "loss_mask": [0 or 1, ...] of the same length; without it all 1
};
const char* name(RecordForm form);  // "auto", "messages", "prompt_response", "text", "input_ids"
RecordForm record_form_from(std::string_view name);  // BadConfig lists the allowed names

struct Record {
  RecordForm form = RecordForm::kText;  // never kAuto
  ChatJson messages;               // kMessages; kPromptResponse with a list: the list and the response's turn
  ChatJson tools;                  // null where there are none
  std::string prompt, response;    // kPromptResponse with a text
  std::string text;                // kText
  std::vector<int32_t> ids;        // kInputIds
  std::vector<uint8_t> loss_mask;  // kInputIds, as long as ids
};

// Why a record cannot be used; records that are skipped are counted by it.
enum class Reject {
  kJson,    // not a JSON object in UTF-8
  kField,   // a field that is missing, too many, or of the wrong type or value
  kText,    // tokenizer, chat template or loss mask refuse the text
  kEmpty,   // no tokens
  kLength,  // longer than the longest allowed
};
constexpr int kRejects = 5;
const char* name(Reject reason);  // "json", "field", ...

// A BadData that knows its reason.  Its message starts with "file:line: ".
class BadRecord : public Error {
 public:
  BadRecord(Reject reason, const std::string& message)
      : Error(ErrorKind::kBadData, message), reason_(reason) {}
  Reject reason() const { return reason_; }

 private:
  Reject reason_;
};

// `line` is any bytes.  `where` ("file:line") starts each message.  Ids must be in [0, vocab_size).  Content
// that is a list of {"type": "text", "text": ...} becomes one text; other content types are refused.
// BadRecord.
Record parse_record(std::string_view line, RecordForm form, int64_t vocab_size, const std::string& where);

}  // namespace titanium
