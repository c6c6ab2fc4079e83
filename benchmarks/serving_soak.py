"""Many requests to a sparse server of vLLM, some of them cancelled: no error, no page left behind, memory flat.

    python benchmarks/serving_soak.py --model M --indexers run/indexers --server "--dtype float32 --max-model-len 2048"

Requests have prompts of mixed lengths; every fifth is cancelled when its first token has come. vLLM's own counters say
how much of the cache is in use, and must return to where they started. At last a prompt that is longer than the server
takes is sent, which must be refused and harm nothing. Without ``--indexers`` the server is vLLM's own, to compare with.
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import re
import shlex
import statistics
import sys
import threading
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from streamkl.bench.serve.server import serving


def complete(address: str, prompt: list[int], tokens: int, cancel: bool) -> tuple[int, int]:
    """Sends a request, and reads its stream; returns the status and how many parts of an answer came."""
    connection = http.client.HTTPConnection(address.removeprefix("http://"), timeout=600)
    body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "stream": True, "ignore_eos": True}
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    answer = connection.getresponse()
    parts = 0
    if answer.status == 200:
        for line in answer:
            parts += line.startswith(b"data: {")
            if cancel and parts:
                break
    connection.close()
    return answer.status, parts


def counters(address: str) -> dict[str, float]:
    """The share of the cache in use, and the requests that run and wait, by vLLM's own counters."""
    text = urllib.request.urlopen(f"{address}/metrics", timeout=60).read().decode()
    names = ("kv_cache_usage_perc", "num_requests_running", "num_requests_waiting")
    return {name: float(re.findall(rf"^vllm:{name}{{[^}}]*}} (\S+)$", text, re.MULTILINE)[0]) for name in names}


def resident(started: float) -> float:
    """Megabytes of all processes of vLLM that have started since."""
    total = 0
    for path in Path("/proc").glob("[0-9]*"):
        try:
            command = (path / "cmdline").read_bytes()
            if b"vllm" in command.lower() and path.stat().st_mtime >= started and b"serving_soak" not in command:
                total += int(re.findall(r"VmRSS:\s*(\d+)", (path / "status").read_text())[0])
        except (OSError, IndexError):
            continue  # it has ended
    return total / 1024


def main() -> None:
    """Serves, sends, and says what was found; exits with 1 if something is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--indexers", default="", help="a folder of indexers; none: vLLM's own dense server")
    parser.add_argument("--server", default="", help="arguments of vllm serve")
    for name, default in (("requests", 200), ("at-once", 8), ("shortest", 8), ("longest", 1500), ("tokens", 8),
                          ("too-long", 100_000), ("topk", 256)):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default)
    given = parser.parse_args()
    streamkl: dict[str, Any] = {
        "indexers": str(Path(given.indexers).resolve()),
        "selector": {"kind": "indexer", "topk": given.topk, "query_block": 64, "normalise": True},
    }
    arguments = shlex.split(given.server)
    if given.indexers:
        arguments += ["--hf-overrides", json.dumps({"streamkl": streamkl})]
    draw, started = random.Random(0), time.time()
    prompts = [
        [draw.randrange(1000, 40_000) for _ in range(draw.randint(given.shortest, given.longest))]
        for _ in range(given.requests)
    ]
    wrong: list[str] = []
    memory: list[float] = []
    done = threading.Semaphore(0)
    with serving(given.model, arguments, Path("serving_soak.log")) as address:
        complete(address, prompts[0], 2, cancel=False)  # what is made once is made
        before = counters(address)

        def send(number: int) -> None:
            cancel = number % 5 == 4
            status, parts = complete(address, prompts[number], given.tokens, cancel)
            if status != 200 or parts < (1 if cancel else given.tokens):
                wrong.append(f"request {number}: status {status}, {parts} parts")
            memory.append(resident(started))
            done.release()

        with ThreadPoolExecutor(given.at_once) as pool:
            for number in range(given.requests):
                pool.submit(send, number)
            for number in range(given.requests):
                done.acquire()
                if (number + 1) % 20 == 0:
                    print(f"{number + 1} of {given.requests}, {memory[-1]:,.0f} MB", flush=True)
        until = time.monotonic() + 30
        while (after := counters(address)) != before and time.monotonic() < until:
            time.sleep(0.5)
        refused, _ = complete(address, [1000] * given.too_long, 1, cancel=False)
        again, parts = complete(address, prompts[0], 2, cancel=False)
    quarter = len(memory) // 4
    first, last = (statistics.median(part) for part in (memory[quarter : 2 * quarter], memory[-quarter:]))
    print(f"counters before {before}\ncounters after  {after}")
    print(f"memory: {first:,.0f} MB in the second quarter, {last:,.0f} MB in the last, {last / first:.3f}x")
    print(f"a prompt of {given.too_long:,} tokens: status {refused}; one after it: status {again}, {parts} parts")
    if after != before:
        wrong.append("the counters have not returned")
    if refused != 400 or again != 200:
        wrong.append("the prompt that is too long was not refused as vLLM does it")
    print(f"{given.requests} requests, {given.requests // 5} cancelled: {len(wrong)} wrong", *wrong, sep="\n")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
