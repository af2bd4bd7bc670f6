#include "titanium/text/tokenizer.h"

#include "titanium/base/error.h"
#include "titanium/text/nfc.h"
#include "titanium/text/tokenizer_impl.h"

namespace titanium {
namespace {

// Runs one call of encode; holds what threads must not share.
class Encoder final : PieceSink {
 public:
  Encoder(const Tokenizer::Impl& impl, Encoding& out)
      : impl_(impl),
        out_(out),
        before_prefix_(impl.before_prefix, impl.properties),
        after_prefix_(impl.after_prefix, impl.properties) {
    prefix_sink_.self = this;
  }

  void run(std::string_view text) {
    for (const auto& raw : impl_.added_raw.split(text, impl_.properties)) {
      if (raw.id >= 0) {
        push(raw.id, static_cast<int64_t>(raw.begin), static_cast<int64_t>(raw.end));
        continue;
      }
      base_ = raw.begin;
      normalized_ = {};
      std::string_view piece = text.substr(raw.begin, raw.end - raw.begin);
      if (impl_.nfc) normalized_ = nfc(piece, impl_.properties);
      if (normalized_.changed) piece = normalized_.text;
      if (impl_.added_normalized.empty()) {
        run_text(piece, 0, piece.size());
        continue;
      }
      for (const auto& part : impl_.added_normalized.split(piece, impl_.properties)) {
        if (part.id < 0) {
          run_text(piece, part.begin, part.end);
        } else if (part.begin < part.end) {
          const ByteSpan span = original(part.begin, part.end);
          push(part.id, span.begin, span.end);
        }
      }
    }
  }

 private:
  // Called with the pieces that BPE works on.
  void piece(size_t begin, size_t end) override {
    symbols_.clear();
    out_.dropped_bytes += impl_.bpe->encode(text_.substr(begin, end - begin), symbols_);
    for (const Bpe::Symbol& symbol : symbols_) {
      const ByteSpan span = original(begin + symbol.begin, begin + symbol.end);
      push(symbol.id, span.begin, span.end);
    }
  }

  struct PrefixSink final : PieceSink {
    Encoder* self;
    void piece(size_t begin, size_t end) override { self->with_prefix(begin, end); }
  };

  void run_text(std::string_view text, size_t begin, size_t end) {
    text_ = text;
    if (impl_.add_prefix_space)
      before_prefix_.run(text, begin, end, prefix_sink_);
    else
      before_prefix_.run(text, begin, end, *this);
  }

  void with_prefix(size_t begin, size_t end) {
    const std::string_view whole = text_;
    if (whole[begin] == ' ') {
      after_prefix_.run(whole, begin, end, *this);
      return;
    }
    prefixed_.assign(1, ' ');
    prefixed_ += whole.substr(begin, end - begin);
    text_ = prefixed_;
    in_prefixed_ = true;
    prefixed_from_ = begin;
    after_prefix_.run(text_, 0, text_.size(), *this);
    in_prefixed_ = false;
    text_ = whole;
  }

  // From bytes of text_ to bytes of the input.
  ByteSpan original(size_t begin, size_t end) const {
    if (in_prefixed_) {  // the added space stands for no byte
      begin = prefixed_from_ + (begin > 0 ? begin - 1 : 0);
      end = prefixed_from_ + end - 1;
      if (begin == end) return at_edge(begin);
    }
    const auto base = static_cast<int64_t>(base_);
    if (!normalized_.changed) return {base + static_cast<int64_t>(begin), base + static_cast<int64_t>(end)};
    return {base + normalized_.spans[begin].begin, base + normalized_.spans[end - 1].end};
  }
  ByteSpan at_edge(size_t i) const {
    const int64_t at = static_cast<int64_t>(base_) +
                       (normalized_.changed ? normalized_.spans[i].begin : static_cast<int64_t>(i));
    return {at, at};
  }

  void push(int64_t id, int64_t begin, int64_t end) {
    out_.ids.push_back(id);
    out_.spans.push_back({begin, end});
  }

  const Tokenizer::Impl& impl_;
  Encoding& out_;
  PreTokenizer before_prefix_, after_prefix_;
  PrefixSink prefix_sink_;
  std::string_view text_;
  size_t base_ = 0;  // of the normalized piece in the input
  Normalized normalized_;
  bool in_prefixed_ = false;
  size_t prefixed_from_ = 0;
  std::string prefixed_;
  std::vector<Bpe::Symbol> symbols_;
};

}  // namespace

Tokenizer::Tokenizer(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Tokenizer::Tokenizer(Tokenizer&&) noexcept = default;
Tokenizer& Tokenizer::operator=(Tokenizer&&) noexcept = default;
Tokenizer::~Tokenizer() = default;

Encoding Tokenizer::encode(std::string_view text, bool add_special_tokens) const {
  const size_t bad = unicode::find_bad_utf8(text);
  if (bad != std::string_view::npos)
    throw BadData("the text is not UTF-8: byte {} of {} is 0x{:02x}", bad, text.size(),
                  static_cast<unsigned>(static_cast<uint8_t>(text[bad])));
  Encoding out;
  out.ids.reserve(text.size() / 4 + 8);
  out.spans.reserve(text.size() / 4 + 8);
  auto add = [&](const std::vector<int64_t>& ids, int64_t at) {
    for (const int64_t id : ids) {
      out.ids.push_back(id);
      out.spans.push_back({at, at});
    }
  };
  if (add_special_tokens) add(impl_->prefix, 0);
  Encoder(*impl_, out).run(text);
  if (add_special_tokens) add(impl_->suffix, static_cast<int64_t>(text.size()));
  return out;
}

std::string Tokenizer::decode(const std::vector<int64_t>& ids, bool skip_special) const {
  std::string bytes;
  for (const int64_t id : ids) {
    if (!is_token(id))
      throw BadData("token id {} is not in {} ({} ids)", id, impl_->name, impl_->tokens.size());
    const Impl::Token& token = impl_->tokens[static_cast<size_t>(id)];
    if (!skip_special || !token.special) bytes.append(impl_->token_bytes, token.offset, token.size);
  }
  std::string out;
  out.reserve(bytes.size());
  unicode::append_repaired(out, bytes);
  return out;
}

std::optional<int64_t> Tokenizer::id(std::string_view token) const {
  const auto found = impl_->ids.find(std::string(token));
  if (found == impl_->ids.end()) return std::nullopt;
  return found->second;
}

std::string Tokenizer::token_bytes(int64_t id) const {
  if (!is_token(id))
    throw BadData("token id {} is not in {} ({} ids)", id, impl_->name, impl_->tokens.size());
  const Impl::Token& token = impl_->tokens[static_cast<size_t>(id)];
  return impl_->token_bytes.substr(token.offset, token.size);
}

bool Tokenizer::is_token(int64_t id) const {
  return id >= 0 && id < vocab_size() && impl_->tokens[static_cast<size_t>(id)].used;
}

bool Tokenizer::is_special(int64_t id) const {
  return is_token(id) && impl_->tokens[static_cast<size_t>(id)].special;
}

int64_t Tokenizer::vocab_size() const {
  return static_cast<int64_t>(impl_->tokens.size());
}
const SpecialTokens& Tokenizer::special() const {
  return impl_->special;
}
const std::map<std::string, std::string>& Tokenizer::chat_templates() const {
  return impl_->chat_templates;
}

std::string Tokenizer::special_text(std::optional<int64_t> id) const {
  return id ? token_bytes(*id) : "";
}

StreamDecoder::StreamDecoder(const Tokenizer& tokenizer, bool skip_special)
    : tokenizer_(tokenizer), skip_special_(skip_special) {}

std::string StreamDecoder::push(int64_t id) {
  const std::string bytes = tokenizer_.token_bytes(id);
  if (skip_special_ && tokenizer_.is_special(id)) return "";
  const std::string whole = std::move(pending_) + bytes;
  pending_.clear();
  std::string out;
  unicode::append_repaired(out, whole, &pending_);
  return out;
}

std::string StreamDecoder::finish() {
  std::string out;
  unicode::append_repaired(out, pending_);
  pending_.clear();
  return out;
}

}  // namespace titanium
