# titanium.  On a fresh machine: `make demo`, then `make test`.
BUILD ?= build
JOBS ?= $(shell nproc)

.PHONY: help setup build test test-verl demo bench-setup bench format lint host fuzz nightly clean
help:
	@echo "setup build test test-verl demo bench-setup bench format lint host fuzz nightly clean"

setup:
	@scripts/setup.sh

$(BUILD)/build.ninja:
	@scripts/setup.sh
	cmake --preset release -B $(BUILD)

build: $(BUILD)/build.ninja
	ninja -C $(BUILD) -j $(JOBS)

test: build
	ctest --test-dir $(BUILD) --output-on-failure -LE nightly

# verl's own SFT trainer and engine workers on titanium, beside its fsdp2, in an environment of their own.
test-verl: build
	scripts/verl_setup.sh
	.deps/verl/bin/pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation ./python
	TITANIUM_BINARY=$(abspath $(BUILD))/titanium OMP_NUM_THREADS=1 PYTHONWARNINGS=ignore \
	  .deps/verl/bin/python -m unittest discover -v -s tests/verl
	set -e; for test in engine server protocol; do TITANIUM_BINARY=$(abspath $(BUILD))/titanium TITANIUM_TEST_ARRAYS=torch \
	  .deps/verl/bin/python -B tests/serve/$${test}_test.py; done

demo: $(BUILD)/build.ninja
	ninja -C $(BUILD) -j $(JOBS) titanium
	scripts/demo.sh $(BUILD)

bench-setup:
	scripts/bench_setup.sh

bench: build bench-setup
	bench/run --all

format:
	git ls-files '*.h' '*.cpp' '*.cu' | xargs clang-format -i

lint:
	scripts/lint.sh

# The rooms without torch under ASan and UBSan, with their tests.
host:
	cmake --preset host
	ninja -C build-host -j $(JOBS)
	ctest --test-dir build-host --output-on-failure

fuzz: host
	scripts/fuzz.sh 60

nightly: build host
	scripts/nightly.sh

clean:
	rm -rf build build-*
