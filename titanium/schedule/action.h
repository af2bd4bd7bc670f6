// What a rank does, as data.  A plan is a list of small values: it touches no tensor, can be printed, parsed,
// checked and compared, and one executor runs it.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

namespace titanium {

// Units are gathered and reduced; blocks are run.  The text form is the name in the comment.
enum class Kind : uint8_t {
  kUnshard,    // unshard U: fill the unit's weight buffer (cast, and all-gather in a group)
  kReshard,    // reshard U: the weight buffer may be reused; the shard stays
  kForward,    // forward B keep|drop: run the block; see Save
  kRecompute,  // recompute B: run the forward of a dropped block again from its input, and keep everything
  kBackward,   // backward B: gradients of the input and of the weights; ends what the forward saved
  kBackwardInput,   // backward_input B: the first part of a split backward
  kBackwardWeight,  // backward_weight B: the second part, runs the block's weight queue; needs no weights
  kLoss,        // loss: hand the head's token statistics to the caller; in training he gives their gradient
  kReduce,      // reduce U: sum the unit's gradient over its group and add it into the shard
  kOffload,     // offload B: move what the forward saved to the host
  kOnload,      // onload B: bring it back
  kSendOutput,  // send_output B: to the next pipeline stage; B is the last block of its stage
  kRecvInput,   // recv_input B: from the stage before; B is the first block of its stage
  kSendInputGrad,   // send_input_grad B: to the stage before
  kRecvOutputGrad,  // recv_output_grad B: from the next stage
};
inline constexpr int kKindCount = 15;

// Transfers come in two halves, printed `> unshard 0` and `. unshard 0`; everything else is whole.
enum class Half : uint8_t { kWhole, kStart, kWait };

// What a forward leaves behind for its backward.
enum class Save : uint8_t {
  kNothing,  // `forward 0`: no backward follows (scoring, or nothing below needs a gradient)
  kInput,    // `forward 0 drop`: only the block's input; a recompute comes before the backward
  kAll,      // `forward 0 keep`: the block's graph
};

// Fields that a kind does not have are kNoIndex, so that equality is plain.
inline constexpr int32_t kNoIndex = -1;

struct Action {
  Kind kind = Kind::kLoss;
  Half half = Half::kWhole;
  Save save = Save::kNothing;
  int32_t block = kNoIndex;        // 0-based in the rank's ModelPart
  int32_t unit = kNoIndex;         // 0-based in the rank's ModelPart
  int32_t micro_batch = kNoIndex;  // 0-based; unit actions have none

  bool operator==(const Action&) const = default;

  static Action of_unit(Kind kind, Half half, int32_t unit);
  static Action of_block(Kind kind, int32_t block, int32_t micro_batch, Half half = Half::kWhole);
  static Action forward(int32_t block, int32_t micro_batch, Save save);
  static Action loss(int32_t micro_batch);
};

using Plan = std::vector<Action>;

const char* name(Kind kind);    // "unshard", ...
bool names_unit(Kind kind);     // unshard, reshard, reduce
bool names_block(Kind kind);    // all others but loss
bool has_halves(Kind kind);     // unshard, reduce, offload, onload, and the four transfers between stages
bool is_compute(Kind kind);     // forward, recompute, the three backwards
bool uses_weights(Kind kind);   // compute that reads the block's units: all but backward_weight
bool adds_gradient(Kind kind);  // backward, backward_weight

std::string to_string(
    const Action& action);  // the text form, the micro-batch always shown: `forward 3 drop @2`

}  // namespace titanium
