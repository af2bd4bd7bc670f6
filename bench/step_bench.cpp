// Our side of bench/run: the same work as bench/peer.py, on the same token ids.
//   bench_step train|score|decode --model DIR --ids FILE --dtype bf16|fp32 --docs N --length L --steps K
//   bench_step base                                             bytes that a process holds before it does
//   anything bench_step ids --model DIR --text FILE --count N --ids FILE      writes the first N token ids of
//   a text
// prints one JSON line: {"seconds": [per step], "tokens": per step of all ranks, "peak_rss": bytes}
// As a rank of several (RANK, WORLD_SIZE, ... are set), the documents are cut over the ranks (FSDP2).
#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <CLI/CLI.hpp>
#include <chrono>
#include <iostream>

#include "titanium/base/openmp.h"
#include "titanium/batch/pack.h"
#include "titanium/dist/open_world.h"
#include "titanium/formats/json.h"
#include "titanium/loss/sft.h"
#include "titanium/ops/allocator.h"
#include "titanium/optim/clip.h"
#include "titanium/optim/optimizer.h"
#include "titanium/report/memory.h"
#include "titanium/rollout/generate.h"
#include "titanium/text/tokenizer.h"
#include "titanium/train/micro_batches.h"
#include "titanium/train/session.h"

namespace titanium {
namespace {

struct Arguments {
  std::string mode, model, ids, text, dtype = "bf16";
  int64_t docs = 4, length = 512, steps = 5, count = 0;
  int threads = 2;
};

void write_ids(const Arguments& a) {
  const Tokenizer tokenizer = Tokenizer::from_folder(a.model);
  Encoding encoding = tokenizer.encode(read_file(a.text));
  if (static_cast<int64_t>(encoding.ids.size()) < a.count) {
    throw BadData("{}: {} tokens, {} are wanted", a.text, encoding.ids.size(), a.count);
  }
  encoding.ids.resize(static_cast<size_t>(a.count));
  write_file(a.ids, Json(encoding.ids).dump());
}

void measure(const Arguments& a) {
  at::set_num_threads(a.threads);
  TrainConfig config;
  config.training.mixed_precision_param = a.dtype == "bf16" ? Dtype::BF16 : Dtype::F32;
  const std::shared_ptr<World> world = open_world(config.comm);
  config.training.max_tokens_per_microbatch = a.docs * a.length / world->size();
  config.training.seq_len = a.length;
  if (a.mode == "decode") config.training.dtype = config.training.mixed_precision_param;  // as one serves it
  LogOptions quiet;
  quiet.level = LogLevel::kWarning;
  Log log(quiet);
  Session session = open_session(a.model, config, log, /*load_weights=*/true, world);
  const auto ids = read_json(a.ids).get<std::vector<int64_t>>();

  std::vector<Sample> samples;
  for (int64_t d = 0; d < a.docs; ++d) {
    Sample s;
    s.ids.assign(ids.begin() + d * a.length, ids.begin() + (d + 1) * a.length);
    s.loss_mask.assign(s.ids.size(), 1);
    s.index = d;
    samples.push_back(std::move(s));
  }
  Json seconds = Json::array(), checks = Json::array();
  int64_t tokens = a.docs * a.length;
  const auto timed = [&](const std::function<Json()>& work) {
    const auto begin = std::chrono::steady_clock::now();
    checks.push_back(work());
    seconds.push_back(std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count());
  };

  if (a.mode == "train") {
    const auto optimizer = make_optimizer(*session.store, optimizer_options(config.optimizer));
    session.store->zero_grad();
    for (int64_t step = 0; step < a.steps; ++step) {
      timed([&] {
        const auto batches = micro_batches(samples, config.training, count(samples), session.store->mesh());
        const LossSum sum = session.step->forward_backward(batches, SftLoss());
        const double norm = grad_norm(*session.store).value;
        optimizer->step({.lr = config.optimizer.lr,
                         .clip = clip_coefficient(norm, config.training.max_norm),
                         .zero_grad = true});
        return Json(session.store->mesh().data().sum(sum.loss.item<double>()));
      });
    }
  } else if (a.mode == "score") {
    for (int64_t step = 0; step < a.steps; ++step) {
      timed([&] {
        const auto batches = micro_batches(samples, config.training, count(samples), session.store->mesh());
        const auto stats = session.step->score(batches, {.entropy = true}, HeadRows::kLabelled);
        const double n = static_cast<double>(a.docs * (a.length - 1));
        return Json{stats[0].logprob.sum().item<double>() / n, stats[0].entropy.sum().item<double>() / n};
      });
    }
  } else {
    const int64_t prompt = a.length / 2;
    std::vector<std::vector<int64_t>> prompts;
    for (const Sample& s : samples) prompts.emplace_back(s.ids.begin(), s.ids.begin() + prompt);
    SamplingOptions options;
    options.max_new_tokens = a.length - prompt;
    tokens = a.docs * options.max_new_tokens;
    for (int64_t step = 0; step < a.steps; ++step) {
      timed([&] { return Json(generate(*session.model, *session.store, prompts, options)[0].ids.back()); });
    }
  }
  std::cout << Json{{"seconds", seconds},
                    {"tokens", tokens},
                    {"peak_rss", peak_rss_bytes()},
                    {"checks", checks}}
                   .dump()
            << std::endl;
}

}  // namespace
}  // namespace titanium

int main(int argc, char** argv) {
  titanium::let_idle_threads_sleep(argv);
  titanium::use_block_allocator();
  titanium::Arguments a;
  CLI::App app("Our side of bench/run");
  app.add_option("mode", a.mode)
      ->required()
      ->check(CLI::IsMember({"train", "score", "decode", "ids", "base"}));
  app.add_option("--model", a.model);
  app.add_option("--ids", a.ids);
  app.add_option("--text", a.text);
  app.add_option("--count", a.count);
  app.add_option("--dtype", a.dtype)->check(CLI::IsMember({"bf16", "fp32"}));
  app.add_option("--docs", a.docs);
  app.add_option("--length", a.length);
  app.add_option("--steps", a.steps);
  app.add_option("--threads", a.threads);
  CLI11_PARSE(app, argc, argv);
  try {
    if (a.mode == "base") {
      std::cout << titanium::rss_bytes() << std::endl;
    } else {
      if (a.model.empty() || a.ids.empty()) throw titanium::BadConfig("{} needs --model and --ids", a.mode);
      a.mode == "ids" ? titanium::write_ids(a) : titanium::measure(a);
    }
  } catch (const titanium::Error& e) {
    std::cerr << "bench_step: " << e.what() << std::endl;
    return titanium::exit_code(e.kind());
  }
  return 0;
}
