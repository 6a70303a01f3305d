"""Write documents of random tokens, for measurements that need a shape and no meaning.

python tools/write_random_documents.py OUT --vocab-size 248320 --documents 200 --length 512 4096
"""

import argparse
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from engine.data.shards import write_documents


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--vocab-size", type=int, required=True)
    parser.add_argument("--below", type=int, help="largest id plus one; the vocabulary size by default")
    parser.add_argument("--documents", type=int, default=200)
    parser.add_argument("--length", type=int, nargs=2, default=(512, 3072), metavar=("MIN", "MAX"))
    parser.add_argument("--prompt-share", type=float, default=0.2)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    random = np.random.default_rng(options.seed)

    def rows() -> Iterator[tuple[list[int], list[int]]]:
        for _ in range(options.documents):
            length = int(random.integers(options.length[0], options.length[1] + 1))
            prompt = int(length * options.prompt_share)
            ids = random.integers(0, options.below or options.vocab_size, length)
            yield ids.tolist(), [0] * prompt + [1] * (length - prompt)

    manifest = write_documents(options.out, rows(), vocab_size=options.vocab_size)
    print(f"{options.out}: {manifest.documents} documents, {manifest.tokens:,} tokens")


if __name__ == "__main__":
    main()
