#include "titanium/train/timeline_page.h"

#include "titanium/formats/json.h"

namespace titanium {
namespace {

// Bytes held while each action of the compute runs: when it starts, and how many.
std::vector<std::pair<double, double>> memory_over_time(const StepEstimate::Rank& estimate,
                                                        const std::vector<TimedAction>& actions) {
  std::vector<std::pair<double, double>> points;
  for (const TimedAction& timed : actions) {
    if (timed.transfer) continue;
    const int64_t of_plan = timed.action < 0 ? 0 : estimate.over_plan.at(timed.action).total();
    points.emplace_back(timed.start, static_cast<double>(estimate.always + of_plan));
  }
  return points;
}

std::string label(const Plan& plan, const TimedAction& timed) {
  return timed.action < 0 ? "norm, clip and update" : to_string(plan[timed.action]);
}

// What a colour stands for.
const char* category(const Plan& plan, const TimedAction& timed) {
  if (timed.action < 0) return "update";
  switch (plan[timed.action].kind) {
    case Kind::kForward:
      return "forward";
    case Kind::kRecompute:
      return "recompute";
    case Kind::kBackward:
      return "backward";
    case Kind::kBackwardInput:
      return "backward input";
    case Kind::kBackwardWeight:
      return "backward weight";
    case Kind::kUnshard:
      return timed.transfer ? "gather" : "cast";
    case Kind::kReduce:
      return timed.transfer ? "reduce" : "add";
    case Kind::kLoss:
      return "loss";
    default:
      return "stage transfer";
  }
}

// A file's name need not be UTF-8.
std::string text_of(const Json& json) {
  return json.dump(-1, ' ', /*ensure_ascii=*/false, Json::error_handler_t::replace);
}

// `<` could end the script that holds the text.
std::string in_script(const Json& json) {
  std::string out;
  for (const char c : text_of(json)) {
    if (c == '<') {
      out += "\\u003c";
    } else {
      out += c;
    }
  }
  return out;
}

constexpr const char* kPage = R"html(<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>titanium plan</title>
<style>
body { font: 13px/1.4 system-ui, sans-serif; margin: 16px; color: #222; }
h1 { font-size: 16px; margin: 0 0 4px; } canvas { width: 100%; border: 1px solid #ccc; cursor: grab; }
#legend span { display: inline-block; margin-right: 12px; } #legend i { display: inline-block; width: 10px; height: 10px; margin-right: 4px; }
#what { min-height: 1.4em; color: #555; }
</style></head><body>
<h1 id="title"></h1><div id="facts"></div><div id="legend"></div><div id="what">&nbsp;</div><canvas id="view"></canvas>
<script>
"use strict";
const data = DATA;
const colours = {"forward": "#4c78a8", "recompute": "#9ecae9", "backward": "#f58518", "backward input": "#f58518", "backward weight": "#ffbf79",
  "gather": "#54a24b", "reduce": "#88d27a", "stage transfer": "#b279a2", "cast": "#bab0ac", "add": "#d6cfcb", "loss": "#e45756", "update": "#79706e"};
const canvas = document.getElementById("view"), what = document.getElementById("what");
document.getElementById("title").textContent = data.title;
document.getElementById("facts").textContent =
  `${data.seconds.toPrecision(4)} s a step, ${(100 * data.bubble).toFixed(1)} % of the ranks' time idle`;
const used = new Set(data.ranks.flatMap(r => r.actions.map(a => a[2])));
for (const [name, colour] of Object.entries(colours)) {
  if (!used.has(name)) continue;
  const entry = document.createElement("span"), box = document.createElement("i");
  box.style.background = colour;
  entry.append(box, name);
  document.getElementById("legend").append(entry);
}
const left = 110, bar = 22, lane = 12, gap = 10, graph = 60, row = bar + lane + graph + 3 * gap;
const most = Math.max(1, ...data.ranks.flatMap(r => r.memory.map(m => m[1])));
let from = 0, to = data.seconds;
function bytes(n) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let i = 0;
  while (n >= 1024 && i < 4) { n /= 1024; ++i; }
  return n.toPrecision(3) + " " + units[i];
}
function draw() {
  const scale = window.devicePixelRatio || 1, width = canvas.clientWidth, height = data.ranks.length * row + 24;
  canvas.style.height = height + "px";
  canvas.width = width * scale;
  canvas.height = height * scale;
  const g = canvas.getContext("2d");
  g.scale(scale, scale);
  const x = t => left + (t - from) / (to - from) * (width - left - 8);
  g.font = "11px system-ui, sans-serif";
  data.ranks.forEach((rank, r) => {
    const top = r * row + gap;
    g.save();
    g.beginPath();
    g.rect(left, top - 2, width - left, row);
    g.clip();
    for (const [start, end, kind, , transfer] of rank.actions) {
      const x0 = x(start), x1 = x(end);
      if (x1 < left || x0 > width) continue;
      g.fillStyle = colours[kind] || "#999";
      g.fillRect(x0, transfer ? top + bar + 2 : top, Math.max(x1 - x0 - (x1 - x0 > 4 ? 1 : 0), 0.5), transfer ? lane - 2 : bar);
    }
    const base = top + bar + lane + gap + graph;
    g.beginPath();
    g.moveTo(x(0), base);
    let last = 0;
    for (const [t, n] of rank.memory) {
      g.lineTo(x(t), base - last / most * graph);
      g.lineTo(x(t), base - n / most * graph);
      last = n;
    }
    g.lineTo(x(data.seconds), base - last / most * graph);
    g.lineTo(x(data.seconds), base);
    g.fillStyle = "#d9e5f2";
    g.fill();
    g.strokeStyle = "#4c78a8";
    g.stroke();
    g.restore();
    g.fillStyle = "#222";
    g.fillText(rank.name, 4, top + 14);
    g.fillStyle = "#777";
    g.fillText("transfers", 4, top + bar + 10);
    g.fillText(bytes(Math.max(...rank.memory.map(m => m[1]))), 4, top + bar + lane + gap + 10);
  });
  g.fillStyle = "#777";
  for (let i = 0; i <= 8; ++i) {
    const t = from + (to - from) * i / 8;
    g.fillText(t.toPrecision(4) + " s", Math.min(x(t), width - 60), height - 8);
  }
}
function time(event) {
  const box = canvas.getBoundingClientRect();
  return from + (event.clientX - box.left - left) / (box.width - left - 8) * (to - from);
}
canvas.addEventListener("wheel", event => {
  event.preventDefault();
  const t = time(event), zoom = Math.exp(event.deltaY / 400);
  from = Math.max(0, t - (t - from) * zoom);
  to = Math.min(data.seconds, t + (to - t) * zoom);
  draw();
}, {passive: false});
let held = null;
canvas.addEventListener("mousedown", event => { held = time(event); });
window.addEventListener("mouseup", () => { held = null; });
canvas.addEventListener("mousemove", event => {
  const t = time(event);
  if (held !== null) {
    const by = Math.max(-from, Math.min(held - t, data.seconds - to));
    from += by;
    to += by;
    draw();
    return;
  }
  const box = canvas.getBoundingClientRect(), y = event.clientY - box.top, rank = data.ranks[Math.floor(y / row)];
  const hit = rank && rank.actions.find(a => a[0] <= t && t < a[1] && Boolean(a[4]) === (y % row > gap + bar));
  what.textContent = hit ? `${rank.name}: ${hit[3]}, ${hit[0].toPrecision(5)} to ${hit[1].toPrecision(5)} s` : "\u00a0";
});
window.addEventListener("resize", draw);
draw();
document.body.dataset.drawn = String(data.ranks.reduce((n, r) => n + r.actions.length, 0));
</script></body></html>
)html";

}  // namespace

std::string timeline_html(const TimelinePage& page, const StepEstimate& estimate, const Timeline& timeline) {
  Json data = {{"title", page.title},
               {"seconds", timeline.seconds},
               {"bubble", timeline.bubble()},
               {"ranks", Json::array()}};
  for (size_t r = 0; r < timeline.ranks.size(); ++r) {
    Json actions = Json::array();
    for (const TimedAction& timed : timeline.ranks[r].actions)
      actions.push_back({timed.start, timed.end, category(estimate.plans[r], timed),
                         label(estimate.plans[r], timed), timed.transfer ? 1 : 0});
    data["ranks"].push_back({{"name", page.ranks.at(r)},
                             {"actions", actions},
                             {"memory", memory_over_time(estimate.ranks[r], timeline.ranks[r].actions)}});
  }
  std::string html = kPage;
  const std::string mark = "DATA;";
  return html.replace(html.find(mark), mark.size() - 1, in_script(data));
}

std::string timeline_trace(const TimelinePage& page, const StepEstimate& estimate, const Timeline& timeline) {
  Json events = Json::array();
  for (size_t r = 0; r < timeline.ranks.size(); ++r) {
    const auto name = [&](const char* what, int thread, const std::string& value) {
      events.push_back(
          {{"ph", "M"}, {"pid", r}, {"tid", thread}, {"name", what}, {"args", {{"name", value}}}});
    };
    name("process_name", 0, page.ranks.at(r));
    name("thread_name", 0, "compute");
    name("thread_name", 1, "transfers");
    for (const TimedAction& timed : timeline.ranks[r].actions) {
      events.push_back({{"ph", "X"},
                        {"pid", r},
                        {"tid", timed.transfer ? 1 : 0},
                        {"name", label(estimate.plans[r], timed)},
                        {"cat", category(estimate.plans[r], timed)},
                        {"ts", timed.start * 1e6},
                        {"dur", (timed.end - timed.start) * 1e6}});
    }
    for (const auto& [time, bytes] : memory_over_time(estimate.ranks[r], timeline.ranks[r].actions))
      events.push_back(
          {{"ph", "C"}, {"pid", r}, {"name", "memory"}, {"ts", time * 1e6}, {"args", {{"bytes", bytes}}}});
  }
  return text_of(
      {{"displayTimeUnit", "ms"}, {"otherData", {{"title", page.title}}}, {"traceEvents", events}});
}

}  // namespace titanium
