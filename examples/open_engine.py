"""An engine of thirty lines that speaks the open event form: it caches the blocks of the prompts that it reads, and reports
them.

    kvatlas publish --engine open --status-port 9100 --worker-id w1 --model-id m &
    python examples/open_engine.py < prompts.jsonl |
        while read -r batch; do curl -d "$batch" http://127.0.0.1:9100/events; done

Each line of its input is a prompt: a JSON array of token ids.
"""

import hashlib
import json
import sys
from collections import OrderedDict

BLOCK_SIZE, CAPACITY = 16, 1024
cached: OrderedDict[str, None] = OrderedDict()  # block hashes, in order of eviction


def tell(**event: object) -> None:
    print(json.dumps({"engine_id": "example", "events": [event]}), flush=True)


def compute(tokens: list[int]) -> None:
    names: list[str] = []
    for end in range(BLOCK_SIZE, len(tokens) + 1, BLOCK_SIZE):
        name = hashlib.sha256(json.dumps(tokens[:end]).encode()).hexdigest()
        if name not in cached:
            block, parent = tokens[end - BLOCK_SIZE : end], names[-1] if names else None
            tell(
                type="block_stored",
                block_hashes=[name],
                parent_block_hash=parent,
                token_ids=block,
                block_size=BLOCK_SIZE,
            )
        names.append(name)
    for name in reversed(names):  # a block is evicted before the one that it follows
        cached[name] = None
        cached.move_to_end(name)
    while len(cached) > CAPACITY:
        tell(type="block_removed", block_hashes=[cached.popitem(last=False)[0]])


tell(type="all_blocks_cleared")  # whatever an earlier process held is gone
for line in sys.stdin:
    compute(json.loads(line))
