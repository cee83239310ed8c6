"""Fine-tune a model of the hub on conversations, export it, and ask it in transformers. Run it with:

    python examples/fine_tune.py [DIRECTORY]

It needs the extra "hf" and no network: the model is a Qwen3-MoE with random weights and a tokenizer of bytes, made here
in the form that downloads have. With a real one, leave out `make_checkpoint`, and give its directory as
`init.from_hf`; all else is the same: a file of conversations, and the settings in `RUN`.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3MoeConfig, Qwen3MoeForCausalLM

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
COLOURS = {"grass": "green", "snow": "white", "coal": "black", "blood": "red", "the sky": "blue", "the sun": "yellow"}
RUN = """
[init]
from_hf = "checkpoint"            # its tokenizer and chat template are taken

[data]
path = "conversations.jsonl"
chat = true                       # only what the assistant says counts for the loss
separate_documents = true         # conversations in one sequence do not see each other
validation_fraction = 0.1

[parallel]
pp = 2
device = "cpu"

[train]
steps = 60
sequence_length = 256
micro_batch_size = 1
num_chunks = 4
eval_batches = 1

[optimizer]
lr = 5e-3
warmup_steps = 5

[output]
dir = "{folder}/out"

[export]
to_hf = "auto"                    # out/hf
"""


def make_checkpoint(folder: Path) -> None:
    """Write a model with random weights, a tokenizer and a chat template, as `save_pretrained` does."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({byte: number for number, byte in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|im_start|>", special=True), AddedToken("<|im_end|>", special=True)])
    chat = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", chat_template=CHATML)
    chat.save_pretrained(folder)
    torch.manual_seed(0)
    Qwen3MoeForCausalLM(Qwen3MoeConfig(
        vocab_size=len(chat), hidden_size=64, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
        head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64, norm_topk_prob=True,
        eos_token_id=chat.eos_token_id,
    )).save_pretrained(folder)


def write_conversations(file: Path) -> None:
    """Write conversations of two rounds, one a line, in OpenAI's form."""
    lines = []
    for first, first_colour in COLOURS.items():
        for second, second_colour in COLOURS.items():
            messages = [
                {"role": "user", "content": f"What colour is {first}?"},
                {"role": "assistant", "content": first_colour},
                {"role": "user", "content": f"And {second}?"},
                {"role": "assistant", "content": second_colour},
            ]
            lines.append(json.dumps({"messages": messages}) + "\n")
    file.write_text("".join(lines))


def ask(folder: Path, question: str) -> str:
    """Return the answer of an exported model in transformers."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], add_generation_prompt=True, return_dict=True, return_tensors="pt")
    answer = model.generate(**prompt, max_new_tokens=20, do_sample=False, pad_token_id=tokenizer.eos_token_id)
    return tokenizer.decode(answer[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True)


def main(folder: Path) -> None:
    """Make everything in `folder`, train there, and print an answer."""
    folder.mkdir(parents=True, exist_ok=True)
    make_checkpoint(folder / "checkpoint")
    write_conversations(folder / "conversations.jsonl")
    (folder / "run.toml").write_text(RUN.replace("{folder}", folder.as_posix()))
    subprocess.run([sys.executable, "-P", "-m", "dualpipe", "train", str(folder / "run.toml")], check=True)
    for thing in ("snow", "the sky"):
        question = f"What colour is {thing}?"
        print(f"{question} {ask(folder / 'out/hf', question)}")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "out/fine-tune"))
