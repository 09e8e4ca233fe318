"""Amounts of memory: one meaning of GB and GiB for every option."""

import pytest

from plsc.errors import UsageError
from plsc.sizes import available_bytes, parse_count, parse_memory


def test_amounts_of_memory() -> None:
    sizes = {"4GB": 4 * 10**9, "1.5 GiB": 3 << 29, "4e9": 4 * 10**9, "8.4e+10": 84 * 10**9, "512mb": 512 * 10**6}
    sizes |= {" .5 TiB ": 1 << 39, "7": 7, "7 B": 7}
    assert {text: parse_memory(text, "--max-memory") for text in sizes} == sizes


@pytest.mark.parametrize("text", ["", "much", "4 bananas", "-1GB", "4GBs", "nan", "inf", "0x10", "0", "1.2.3GB", "GB"])
def test_what_is_no_amount_is_refused_by_the_name_of_the_option(text: str) -> None:
    with pytest.raises(UsageError, match=r"--max-memory .* is no amount of memory; write 4GB, 500MiB or 4e9 \(bytes\)"):
        parse_memory(text, "--max-memory")


@pytest.mark.parametrize("text", ["1e999GB", "9" * 400, "1e308tb", "9.3e18", "0.4", "1e" + "9" * 30])
def test_what_is_less_than_a_byte_or_more_than_any_machine_has_is_no_amount(text: str) -> None:
    with pytest.raises(UsageError, match="is no amount of memory"):
        parse_memory(text, "--max-memory")


def test_what_is_available_is_the_machines_or_what_its_container_leaves(tmp_path):
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 9000 kB\nMemFree: 100 kB\nMemAvailable: 4000 kB\n")
    assert available_bytes(meminfo, tmp_path) == 4000 * 1024
    (tmp_path / "memory.max").write_text("max\n")
    assert available_bytes(meminfo, tmp_path) == 4000 * 1024
    (tmp_path / "memory.max").write_text("3000000\n")
    (tmp_path / "memory.current").write_text("2500000\n")
    (tmp_path / "memory.stat").write_text("anon 1500000\ninactive_file 700000\nactive_file 300000\n")
    assert available_bytes(meminfo, tmp_path) == 3_000_000 - 2_500_000 + 700_000
    (tmp_path / "memory.max").write_text("1000000\n")
    assert available_bytes(meminfo, tmp_path) == 0
    assert available_bytes(tmp_path / "none", tmp_path) is None
    assert available_bytes() > 2**20


def test_counts() -> None:
    counts = {"2059906": 2059906, "2,059,906": 2059906, "2_000_000": 2 * 10**6, "500k": 500_000, "2M": 2 * 10**6}
    counts |= {"1e6": 10**6, "2.06m": 2_060_000, "1B": 10**9, "0": 0}
    assert {text: parse_count(text) for text in counts} == counts


@pytest.mark.parametrize(
    "text", ["", "M", "1.5", "-2M", "2MB", "2 million", "1,00", "nan", "inf", "1e400", "1e-3", "1e" + "9" * 30]
)
def test_what_is_no_count(text: str) -> None:
    with pytest.raises(UsageError, match="is no count"):
        parse_count(text)
