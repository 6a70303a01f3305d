"""Write the configuration of the first layers of a target: its shape at a part of its size, for measurements.

python -m tools.write_target_slice builtin:qwen3.6-27b OUT --layers 12
"""

import argparse
from pathlib import Path

import orjson

from engine.builtin import resolve
from engine.target.configuration import read_json


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("target")
    parser.add_argument("out", type=Path)
    parser.add_argument("--layers", type=int, required=True)
    options = parser.parse_args()
    config = dict(read_json(resolve(options.target) / "config.json"))
    text = config.get("text_config", config)
    if not 3 <= options.layers <= text["num_hidden_layers"]:
        parser.error(
            f"--layers {options.layers}: the target has {text['num_hidden_layers']}, and 3 are the least"
        )
    text["num_hidden_layers"] = options.layers
    if "layer_types" in text:
        text["layer_types"] = text["layer_types"][: options.layers]
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "config.json").write_bytes(orjson.dumps(config, option=orjson.OPT_INDENT_2))
    print(f"{options.out}: {options.layers} layers")


if __name__ == "__main__":
    main()
