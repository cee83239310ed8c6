"""Locations: paths stay paths, and URLs are told from them."""

import os
import pickle
from pathlib import Path

import pytest

from dualpipe.runtime.storage.location import RemotePath, absolute, as_location, contains, resolve


def test_strings_with_a_protocol_are_urls():
    run = as_location("s3://bucket/run/")
    assert isinstance(run, RemotePath) and str(run) == "s3://bucket/run" and run == as_location("s3://bucket/run")
    save = run / "step-00000001"
    assert (str(save), save.name, save.parent) == ("s3://bucket/run/step-00000001", "step-00000001", run)
    assert as_location(save) is save and absolute(save) is save and resolve(save) is save
    assert pickle.loads(pickle.dumps(save)) == save
    assert str(as_location("file:///a/b").parent) == "file:///a"
    assert str(as_location("memory://run").parent / "other") == "memory://other"


@pytest.mark.parametrize("path", ["out/checkpoints", Path("out"), "a:b", "/s3/x", "."])
def test_all_else_is_a_path(path):
    assert as_location(path) == Path(path)


def test_it_is_no_path_of_this_machine():
    with pytest.raises(TypeError):
        Path(as_location("s3://bucket/run"))
    with pytest.raises(TypeError):
        os.stat(as_location("s3://bucket/run"))


def test_refused():
    with pytest.raises(ValueError, match=r"s3:/bucket/run looks like a URL that was made a Path.*give it as a string"):
        as_location(Path("s3://bucket/run"))
    with pytest.raises(ValueError, match="is a chain of stores; give the URL of the store itself"):
        as_location("simplecache::s3://bucket/run")


@pytest.mark.parametrize("url", ["file://shared/run", "file://localhost/shared/run", "local://run"])
def test_files_of_another_host(url):
    with pytest.raises(ValueError, match=rf"{url} names '\w+' as the host .*; give {url.partition(':')[0]}:///path"):
        as_location(url)


def test_contains(tmp_path):
    run = as_location("s3://bucket/run")
    assert contains(run, run) and contains(run, run / "step-00000001")
    assert not contains(run, as_location("s3://bucket/run2")) and not contains(run, tmp_path)
    assert contains(tmp_path, tmp_path / "a") and not contains(tmp_path / "a", tmp_path)
