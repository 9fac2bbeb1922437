# Two commands set everything up: `make setup && make demo`; then `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
export OMP_NUM_THREADS ?= 1

# A CPU build by name: a plain `torch` on Linux resolves to a CUDA build of several GB. Where pip's own sources hold no
# CPU build, PyTorch's index of CPU builds is asked. On a machine without CPU wheels of its own: make setup TORCH=torch==2.13.0
TORCH ?= torch==2.13.0+cpu
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu

.PHONY: setup demo test test-engines lint types docs pictures bench latency bench-ingest bench-peers faults attacks security sbom replicas soak lab lab-seed clean

setup: $(VENV)/.ready  ## make .venv and install everything that the tests and the demo need

$(VENV)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet $(TORCH) || $(BIN)/pip install --quiet --index-url $(TORCH_INDEX) $(TORCH)
	$(BIN)/pip install --quiet -c constraints.txt -e ".[dev]"
	touch $@

demo: setup  ## a real small RL job that collapses, caught and rescued (about three minutes)
	$(BIN)/foreshock demo --out out/demo

test: setup  ## everything that runs without a GPU
	$(BIN)/pytest -n 2 --dist loadfile

ENGINES := out/engines
CASES = PYTHONPATH=collectors:. $(ENGINES)/bin/python -m benchmarks.hosts.engines

test-engines: setup $(ENGINES)/.ready  ## both real rollout engines on the CPU: 3.5 GB, about a quarter of an hour
	FORESHOCK_ENGINES=$(CURDIR)/$(ENGINES) FORESHOCK_ENGINES_MODEL=$(CURDIR)/$(ENGINES)/tiny $(BIN)/pytest tests/engines
	$(CASES) sglang --model $(ENGINES)/smol --tokens 32
	$(CASES) vllm --model $(ENGINES)/smol --tokens 32
	$(CASES) vllm --model $(ENGINES)/smol --tokens 32 --only processed
	$(CASES) sglang --model $(ENGINES)/tiny --tokens 128 --only throughput
	$(CASES) vllm --model $(ENGINES)/tiny --tokens 128 --only throughput

$(ENGINES)/.ready: tests/engines/install.sh tests/engines/sglang-cpu.txt tests/engines/models.py
	PYTHON=$(PYTHON) TORCH=$(TORCH) TORCH_INDEX=$(TORCH_INDEX) tests/engines/install.sh $(ENGINES)
	$(ENGINES)/bin/python tests/engines/models.py tiny $(ENGINES)/tiny
	$(ENGINES)/bin/python tests/engines/models.py smol $(ENGINES)/smol
	touch $@

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: setup
	$(BIN)/mypy

docs: setup  ## the docs as a site, in out/site
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

pictures: setup  ## the page and the boards with lab jobs behind them, into docs/pictures (Chromium, PostgreSQL, Prometheus)
	$(BIN)/python -m benchmarks.pictures

bench: setup  ## the SDK's and the service's cost, against peers in the same run
	$(BIN)/python -m benchmarks.sdk.observe
	$(BIN)/python -m benchmarks.sdk.log
	$(BIN)/python -m benchmarks.latency.command

latency: setup  ## from end_step() to the command in the SDK's queue, on both databases
	$(BIN)/python -m benchmarks.latency.command --trials 200

bench-ingest: setup out/peers/.ready  ## frames per second through a real service, beside others, in one run
	$(BIN)/python -m benchmarks.ingest --json out/bench-ingest.json --peers-python out/peers/bin/python

out/peers/.ready:
	$(PYTHON) -m venv out/peers
	out/peers/bin/pip install --quiet mlflow trackio wandb aim tensorboardX
	touch $@

bench-peers: setup out/detection-peers/.ready  ## how early and how quiet, beside other tools (five minutes of CPU)
	$(BIN)/python -m benchmarks.detection.peers --venv out/detection-peers --plot out/bench-peers.png

out/detection-peers/.ready:
	$(PYTHON) -m venv out/detection-peers
	out/detection-peers/bin/pip install --quiet -c constraints.txt rlwatch==0.5.1 rlprobe==0.1.0 rldoctor==0.2.0 \
	  trainspotter==0.2.6 diptest==0.12.0
	touch $@

faults: setup  ## kills, cuts, fills and corrupts while jobs train, three times each; nothing may be lost or doubled (docs/faults.md)
	$(BIN)/python -m benchmarks.faults

attacks: setup  ## a running service, the SDK and the CLI under attack: tried, expected, got (docs/threat-model.md)
	$(BIN)/python -m benchmarks.attacks

security: setup  ## static checks, offline; each exception in the code says why
	mkdir -p out
	$(BIN)/bandit -q -ll -c pyproject.toml -r collectors service lab dashboards alembic 2> out/bandit.log

sbom: setup  ## what is installed, with licences, as CycloneDX JSON in out/sbom.json
	mkdir -p out
	$(BIN)/cyclonedx-py environment --output-reproducible --of JSON -o out/sbom.json $(BIN)/python

replicas: setup  ## one to three replicas on one PostgreSQL, one killed and one stopped: everything once (docs/sizing.md)
	$(BIN)/python -m benchmarks.replicas

soak: setup  ## 500 simulated runs for minutes: nothing lost, memory and latency flat, the database bounded by retention
	$(BIN)/python -m benchmarks.soak --json out/soak.json

lab: setup  ## the figures of lab/README.md, from scratch
	$(BIN)/python -m lab.figures --out out/lab

lab-seed: setup  ## the ladder of the on-policy report, from scratch (under 20 minutes on 2 cores); RESUME=--resume goes on
	$(BIN)/python -m lab.roll_onpolicy.ladder --out out/lab-seed $(RESUME)

clean:
	rm -rf out build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
