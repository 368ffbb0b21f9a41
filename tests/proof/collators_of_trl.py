"""`interop.hf_collator` in TRL's SFTTrainer, in `nox -s peers`: the gradient of a step is that of SFTTrainer's own collator, padded and packed.

float32, to 1e-6 of the whole gradient, however the step is accumulated.
"""

import tempfile
import warnings
from pathlib import Path

from own_losses_of_trl import find_gradient

from skyrl_engine.interop import hf_collator
from skyrl_engine.modeling.tiny import make_parts_differ, write_model, write_tokenizer

WAYS = (("padded", {}, 4, 1), ("padded", {}, 2, 2), ("packed", {}, 2, 2), ("packed", {"varlen": True}, 4, 1))


def main() -> None:
    warnings.simplefilter("ignore", FutureWarning)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_model(folder, "llama")
        make_parts_differ(folder)
        write_tokenizer(folder, ["a few words to learn from here and there"])
        for padding_free in (False, True):
            theirs = find_gradient(folder, None, 4, 1, padding_free=padding_free)
            for collator, options, rows, steps in WAYS:
                ours = find_gradient(folder, None, rows, steps, collator=hf_collator(collator, **options))
                distance = float((ours - theirs).norm() / theirs.norm())
                print(
                    f"{collator} {options}, {rows} rows x {steps}: {distance:.1e} from SFTTrainer's own, padding_free = {padding_free}"
                )
                assert distance <= 1e-6


if __name__ == "__main__":
    main()
