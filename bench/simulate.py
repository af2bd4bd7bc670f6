#!/usr/bin/env python3
"""What `titanium plan --simulate` says beside what runs: step time and memory of two ranks, for three layouts.

bench/simulate.py [--model DIR] [--rounds 3]

Constants are measured first (`titanium launch -n 2 plan --calibrate`), then plan and run alternate; medians of rounds, the first step of a
run dropped.  Memory is the larger rank's peak RSS without what a process holds after start, measured on a rank that has read nothing."""
import argparse
import json
import os
import random
import re
import statistics
import subprocess
import tempfile

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
BUILD = os.environ.get("TITANIUM_BUILD", os.path.join(ROOT, "build"))
TITANIUM = os.path.join(BUILD, "titanium")
LAYOUTS = {
    "FSDP 2": ["--parallelism.data_parallel_shard_degree=2"],
    "TP 2": ["--parallelism.tensor_parallel_degree=2"],
    "PP 2 (1F1B)": ["--parallelism.pipeline_parallel_degree=2"],
}
RUN = """[model]
path = "{model}"
[data]
path = "{data}"
[training]
seq_len = 512
max_tokens_per_microbatch = 1024
global_batch_size = 8
steps = 5
threads = 1
[checkpoint]
enable = false
last_save_in_hf = false
[validator]
enable = false
"""


def run(*command):
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command)}:\n{done.stdout}{done.stderr}")
    return done.stdout


def planned(run_file, hardware, layout):
    text = run(TITANIUM, "plan", run_file, "--world-size", "2", "--simulate", hardware, "--quiet", *layout)
    fullest = re.findall(r"^# memory.*about ([0-9.]+) (\w+)", text, re.M)[-1]
    scale = {"MiB": 1 / 1024, "GiB": 1}[fullest[1]]
    return float(re.search(r"simulated: (\S+) s", text)[1]), float(fullest[0]) * scale


def measured(run_file, folder, layout):
    run(TITANIUM, "launch", "-n", "2", "train", run_file, f"--dump_folder={folder}", *layout)
    with open(os.path.join(folder, "metrics.jsonl")) as file:
        steps = [json.loads(line) for line in file]
    steps = [step for step in steps if "seconds" in step]
    return statistics.median(step["seconds"] for step in steps[1:]), max(step["peak_rss_bytes"] for step in steps) / 2**30


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=os.path.join(BUILD, "smollm2"))
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        generator = random.Random(1)
        data = os.path.join(folder, "ids.jsonl")
        with open(data, "w") as file:
            for _ in range(64):
                file.write(json.dumps({"input_ids": [generator.randrange(40000) for _ in range(512)]}) + "\n")
        run_file, hardware = os.path.join(folder, "run.toml"), os.path.join(folder, "hardware.toml")
        with open(run_file, "w") as file:
            file.write(RUN.format(model=os.path.abspath(arguments.model), data=data))
        values = {name: [] for name in LAYOUTS}
        for number in range(arguments.rounds):
            run(TITANIUM, "launch", "-n", "2", "plan", run_file, "--calibrate", hardware)
            for name, layout in LAYOUTS.items():
                values[name].append((*planned(run_file, hardware, layout), *measured(run_file, f"{folder}/{name}.{number}", layout)))
        base = float(run(os.path.join(BUILD, "bench_step"), "base")) / 2**30
        print(f"a process after start: {base:.2f} GiB")
        for name, rounds in values.items():
            simulated, memory, seconds, rss = (statistics.median(column) for column in zip(*rounds))
            print(f"{name}: {simulated:.2f} s simulated, {seconds:.2f} s measured, ratio {simulated / seconds:.3f}; "
                  f"{memory:.2f} GiB planned, {rss - base:.2f} GiB measured, ratio {memory / (rss - base):.3f}")  # fmt: skip


if __name__ == "__main__":
    main()
