"""Fine-tuning on conversations: transformers' loss in any layout; runs resume; impossible settings are refused."""

import json
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer

from chats import CHATML, FORGETFUL, MARKED, random_chats, save_chat_tokenizer, turns, write_chats
from dualpipe import cli
from dualpipe.train.data.sequences import cut_documents
from dualpipe.train.data.token_stream import PackedTokens, TokenStream
from dualpipe.train.metrics import read_metrics
from hub import save_qwen

RUN = """
[init]
from_hf = "model"
[data]
path = "chats.jsonl"
chat = true
separate_documents = true
validation_path = "validation.jsonl"
[parallel]
device = "cpu"
[train]
steps = 1
sequence_length = 160
micro_batch_size = 2
num_chunks = 4
eval_batches = 4
[optimizer]
lr = 1e-3
clip_norm = 0.0
[output]
dir = "out"
"""
EXAMPLES = Path(__file__).parents[2] / "examples"
SEQUENCES = 8  # of a batch: all there are


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Write a checkpoint with a tokenizer, a run, and as many conversations as fill a batch; fewer for validation."""
    folder = tmp_path_factory.mktemp("chats")
    (folder / "run.toml").write_text(RUN)
    save_qwen(folder / "model", vocab_size=266)
    tokenizer = AutoTokenizer.from_pretrained(save_chat_tokenizer(folder / "model", MARKED))
    chats = [turns("hello", ""), *random_chats(40, words=3)]  # none is longer than a sequence
    lengths = [0, *(len(tokenizer.apply_chat_template(chat)["input_ids"]) for chat in chats)]
    assert max(lengths) <= 160
    bounds = torch.tensor(lengths).cumsum(0).numpy()
    count = max(n for n in range(1, len(chats) + 1) if len(cut_documents(bounds[: n + 1], 161)[0]) == SEQUENCES)
    write_chats(folder / "chats.jsonl", chats[:count])
    write_chats(folder / "validation.jsonl", random_chats(7, seed=1, words=3))
    return folder


def reference(folder, file):
    """Return transformers' (loss, gradient norm, counted tokens), with labels of -100, one conversation at a time."""
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    total, count = torch.zeros(()), 0
    for line in (folder / file).read_text().splitlines():
        rendered = tokenizer.apply_chat_template(
            json.loads(line)["messages"], return_dict=True, return_assistant_tokens_mask=True, return_tensors="pt")
        tokens, mask = rendered["input_ids"], torch.as_tensor(rendered["assistant_masks"]).view(1, -1)
        labels = tokens.where(mask.bool(), -100)
        counted = int((labels[:, 1:] != -100).sum())
        loss = model(input_ids=tokens, labels=labels).loss
        shifted = F.cross_entropy(model(input_ids=tokens).logits[0, :-1], labels[0, 1:])
        assert loss.item() == pytest.approx(shifted.item(), rel=1e-5)
        total, count = total + loss * counted, count + counted
    (total / count).backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    return total.item() / count, norm.item(), count


def run(dualpipe, folder, out, *options):
    done = dualpipe(folder, "train", "run.toml", "--output.dir", out, *options)
    assert done.returncode == 0, done.stderr
    return read_metrics(folder / out / "metrics.jsonl"), done.stdout


@pytest.mark.parametrize("layout", [
    [], ["--parallel.pp", "2", "--parallel.dp", "2", "--train.num_chunks", "2"],
    pytest.param(["--parallel.cp", "2"], marks=pytest.mark.slow),
    pytest.param(["--parallel.pp", "2", "--parallel.ep", "2", "--train.num_chunks", "2"], marks=pytest.mark.slow),
], ids=["alone", "pp2-dp2", "cp2", "pp2-ep2"])
def test_loss_and_gradient_are_those_of_transformers(folder, dualpipe, layout):
    (row,), said = run(dualpipe, folder, "out" + "".join(layout), *layout)
    loss, norm, count = reference(folder, "chats.jsonl")
    assert row["loss"] == pytest.approx(loss, rel=1e-6)
    assert row["grad_norm"] == pytest.approx(norm, rel=1e-5)
    assert row["counted_tokens"] == count
    assert "packed whole into 8 sequences" in said and "see each other" not in said


def text_reference(folder, packed, length, windows):
    """Return transformers' (loss, gradient norm, targets) of text in windows, one piece of a document at a time."""
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    stream = TokenStream(PackedTokens(packed))
    bounds = stream.document_bounds().tolist()
    total, count = torch.zeros(()), 0
    for start in range(0, windows * (length + 1), length + 1):
        stop = start + length + 1
        cuts = [start, *(bound for bound in bounds if start < bound < stop), stop]
        for first, last in pairwise(cuts):
            piece = torch.from_numpy(stream.read(first, last)).unsqueeze(0)
            if last - first > 1:
                total = total + model(input_ids=piece, labels=piece).loss * (last - first - 1)
                count += last - first - 1
    (total / count).backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    return total.item() / count, norm.item(), count


@pytest.mark.parametrize("layout", [
    [], ["--parallel.pp", "2", "--parallel.dp", "2", "--train.num_chunks", "2"],
    pytest.param(["--parallel.cp", "2"], marks=pytest.mark.slow),
], ids=["alone", "pp2-dp2", "cp2"])
def test_text_in_separate_documents_has_no_target_across_their_ends(folder, dualpipe, layout):
    """The loss of transformers for each document alone, with one micro-batch of short documents and one of a long."""
    texts = [turn["content"] for chat in random_chats(20, seed=5) for turn in chat] + ["hello " * 150]
    (folder / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    packed = folder / "packed-text-apart"
    assert cli.main(["data", "pack", str(folder / "text.jsonl"), "--tokenizer", str(folder / "model"), "--overwrite",
                     "--out", str(packed)]) == 0
    length = PackedTokens(packed).documents["length"].sum() // SEQUENCES - 1
    (row,), _ = run(dualpipe, folder, "apart" + "".join(layout), "--data.path", packed, "--data.chat", "False",
                    "--data.validation_path", packed, "--train.sequence_length", length, "--optimizer.lr", "1e-12",
                    "--optimizer.weight_decay", "0", "--train.eval_batches", "1", *layout)
    loss, norm, count = text_reference(folder, packed, length, SEQUENCES)
    assert row["loss"] == pytest.approx(loss, rel=1e-6) and row["grad_norm"] == pytest.approx(norm, rel=1e-5)
    assert row["eval_loss"] == pytest.approx(loss, rel=1e-5)
    assert row["counted_tokens"] == count < SEQUENCES * length


def test_validation_is_a_mean_over_the_tokens_of_all_batches(folder, dualpipe):
    """Batches have one sequence each, or the sequences do not fill the only batch."""
    still = ("--optimizer.lr", "1e-12", "--optimizer.weight_decay", "0")
    expected, _, _ = reference(folder, "validation.jsonl")
    for out, sizes in (("one", ("1", "1")), ("many", ("2", "4"))):
        options = ("--train.micro_batch_size", sizes[0], "--train.num_chunks", sizes[1], *still)
        (row,), _ = run(dualpipe, folder, out, *options)
        assert row["eval_loss"] == pytest.approx(expected, rel=1e-6)


@pytest.mark.slow
def test_a_run_goes_on_with_the_same_bits(folder, dualpipe):
    """The run resumes in the middle of an epoch, with micro-batches of one sequence."""
    options = ["--train.micro_batch_size", "1", "--train.num_chunks", "3", "--parallel.pp", "2",
               "--optimizer.schedule", "constant"]
    straight, _ = run(dualpipe, folder, "straight", *options, "--train.steps", "4")
    saved = [*options, "--checkpoint.interval", "1"]
    run(dualpipe, folder, "halves", *saved, "--train.steps", "2")
    halves, _ = run(dualpipe, folder, "halves", *saved, "--train.steps", "4")
    values = [[(row["loss"], row["grad_norm"], row["counted_tokens"]) for row in rows] for rows in (straight, halves)]
    assert values[0] == values[1] and len(set(values[0])) == 4


@pytest.mark.slow
def test_a_bad_step_is_replayed_with_its_weights(folder, dualpipe):
    """The bundle of a step records that its loss is a mean over tokens."""
    spoil = ("from dualpipe.train import loss; plain = loss.cross_entropy_loss; "
             "loss.cross_entropy_loss = lambda *given, **how: plain(*given, **how) * float('nan')")
    done = dualpipe(folder, "train", "run.toml", "--output.dir", "bad", before=spoil)
    assert done.returncode == 1 and "the step can be run again by: dualpipe replay" in done.stderr
    (bundle,) = (folder / "bad/bundles").glob("step-*")
    assert dualpipe(folder, "replay", bundle, before=spoil).returncode == 0
    fine = dualpipe(folder, "replay", bundle)
    loss, _, _ = reference(folder, "chats.jsonl")
    assert fine.returncode == 1 and "NOT reproduced: loss " in fine.stdout
    assert float(fine.stdout.split("NOT reproduced: loss ")[1].split(",")[0]) == pytest.approx(loss, rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("layout", [["--parallel.cp", "2"], ["--parallel.dp", "2"]], ids=["cp2", "dp2"])
def test_a_rank_without_any_token_that_counts(folder, dualpipe, layout):
    """With cp, one rank has the only answer, of one token; with dp, one sequence has it and another a long answer."""
    name = layout[0][-2:]
    chats = [turns("no " * 20, "")] * 2 if name == "cp" else [turns("no " * 20, ""), turns("no", "yes " * 20)]
    write_chats(folder / f"{name}.jsonl", chats)
    options = ("--data.path", f"{name}.jsonl", "--train.micro_batch_size", "1", "--train.num_chunks", "1",
               "--train.sequence_length", "100", "--train.eval_batches", "0", *layout)
    (row,), _ = run(dualpipe, folder, f"lone-{name}", *options)
    loss, norm, count = reference(folder, f"{name}.jsonl")
    assert row["loss"] == pytest.approx(loss, rel=1e-6) and row["grad_norm"] == pytest.approx(norm, rel=1e-5)
    assert (row["counted_tokens"], count) == ((1, 2) if name == "cp" else (82, 82))


def refusal(folder, capsys, monkeypatch, *options):
    monkeypatch.chdir(folder)
    status = cli.main(["train", "run.toml", "--output.dir", "refused", *options])
    return status, capsys.readouterr()


def test_what_cannot_be_is_refused(folder, capsys, monkeypatch):
    typo = {"messages": [{"role": "user", "content": "a"}, {"role": "asistant", "content": "b"}]}
    files = {
        "typo.jsonl": [{"messages": turns("a", "b")}, typo],
        "silent.jsonl": [{"messages": turns(system="be brief")}, {"messages": []}],
        "pairs.jsonl": [{"prompt": "a", "answer": "b"}],
        "other.jsonl": [{"chat": []}],
        "answer.jsonl": [{"text": "a"}],
    }
    for name, records in files.items():
        (folder / name).write_text("".join(json.dumps(record) + "\n" for record in records))
    (folder / "text.txt").write_text("text")
    model = json.loads((EXAMPLES / "tiny-cpu/deepseek-v3.json").read_text()) | {"vocab_size": 266}
    (folder / "mtp.json").write_text(json.dumps(model))
    for options, text in (
        (["typo.jsonl"], "record 2 of typo.jsonl: message 2 has the role 'asistant'"),
        (["pairs.jsonl"], "with 'prompt' as the user's content and 'answer' as the assistant's"),
        (["pairs.jsonl", "--data.text_key", "prompt"], "its 'prompt' is not a list of messages"),
        (["other.jsonl"], "it has no 'messages' or 'conversations', but 'chat'"),
        (["answer.jsonl"], "its 'text' is not a list of messages"),
        (["chats.jsonl", "--data.text_key", "talk"], "it has no 'talk', but 'messages'"),
        (["silent.jsonl"], "record 1 of silent.jsonl: the assistant says nothing"),
        (["text.txt"], "text.txt holds no conversations"),
        (["chats.jsonl", "--data.chat_template", "none"], "chat template none"),
        (["chats.jsonl", "--train.sequence_length", "4000"], "4001"),
        (["chats.jsonl", "--init.from_hf", "", "--model.config", "mtp.json", "--data.tokenizer", "model",
          "--mtp.weight", "0.3"], "multi-token prediction trains on text alone"),
    ):
        status, said = refusal(folder, capsys, monkeypatch, "--data.path", *options)
        assert status == 2 and text in said.err, said.err


def test_text_that_is_packed_already_is_no_conversation(folder, capsys, monkeypatch):
    monkeypatch.chdir(folder)
    (folder / "texts").mkdir()
    (folder / "texts/a.txt").write_text("a")
    assert cli.main(["data", "pack", "texts", "--out", "packed-text"]) == 0
    status, said = refusal(folder, capsys, monkeypatch, "--data.path", "packed-text")
    assert status == 2 and "packed-text was packed as text" in said.err
    for options in (["--chat-template", "x"], ["--chat", "--end-of-document", "x"]):
        assert cli.main(["data", "pack", "texts", "--out", "new", *options]) == 2
        assert options[-2] in capsys.readouterr().err


def test_packed_conversations_need_no_setting_and_warn_where_they_see_each_other(folder, dualpipe, capsys, monkeypatch):
    """Empty and silent conversations are left out, and files without any; Parquet and ShareGPT's form work too."""
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    monkeypatch.chdir(folder)
    mixed = folder / "mixed"
    mixed.mkdir()
    (mixed / "readme.md").write_text("no records")
    chats = random_chats(30, seed=2)
    rows = [{"conversations": [{"from": {"user": "human"}.get(m["role"], "gpt"), "value": m["content"]} for m in chat]}
            for chat in chats]
    parquet.write_table(pyarrow.Table.from_pylist(rows), mixed / "a.parquet")
    lines = [{"messages": chat} for chat in ([], turns(system="be brief"), turns("a"), turns("b", "c"))]
    (mixed / "b.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.warns(UserWarning) as warned:
        assert cli.main(["data", "pack", "mixed", "--chat", "--tokenizer", "model", "--out", "packed-chats"]) == 0
    said = "".join(str(warning.message) for warning in warned)
    assert all(name in said for name in ("mixed/b.jsonl: empty", "readme.md", "record 2 of mixed/b.jsonl"))
    assert "in 31 documents, 1,095 of them count for the loss" in capsys.readouterr().out
    index = json.loads((folder / "packed-chats/index.json").read_text())
    assert index["format"] == "dualpipe tokens with a loss mask 1" and index["counted"] < index["tokens"]
    options = ("--data.path", "packed-chats", "--data.chat", "False", "--data.separate_documents", "False",
               "--data.validation_path", "None", "--data.validation_fraction", "0.3", "--train.num_chunks", "1")
    (row,), said = run(dualpipe, folder, "seeing", *options)
    assert row["counted_tokens"] > 0 and row["eval_loss"] > 0
    assert "WARNING: conversations in one sequence see each other" in said
    (folder / "packed-chats/loss-mask-00000.bin").write_bytes(b"\1")
    status, said = refusal(folder, capsys, monkeypatch, *options)
    assert status == 2 and "loss-mask-00000.bin" in said.err


def test_a_template_of_ones_own_for_one_whose_turns_are_not_clear(folder, dualpipe, capsys, monkeypatch):
    save_chat_tokenizer(folder / "forgetful", FORGETFUL)
    status, said = refusal(folder, capsys, monkeypatch, "--data.tokenizer", "forgetful")
    assert status == 2 and " of chats.jsonl: the chat template in forgetful " in said.err
    (folder / "own.jinja").write_text(CHATML)
    (row,), _ = run(dualpipe, folder, "own", "--data.tokenizer", "forgetful", "--data.chat_template", "own.jinja")
    assert row["loss"] == pytest.approx(reference(folder, "chats.jsonl")[0], rel=1e-6)
