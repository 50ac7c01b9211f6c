"""Owns the checks of a guest: a newcomer that is prefilled alone beside rows that decode, and then joins them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from .test_engine import CHUNKED, PROMPTS, Driver, expected, open_tiny, shared_engine

ARCHITECTURES = ("qwen3", "gemma3_text", "qwen3_5")


@pytest.fixture(params=ARCHITECTURES)
def architecture(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def drive(architecture: str) -> Iterator[Driver]:
    driver = Driver(shared_engine(architecture))
    yield driver
    for name in driver.tokens:
        driver.drop(name)
    assert not driver.engine.busy


def in_prefill(drive: Driver, name: str) -> bool:
    return bool(drive.prefill[name]) and not drive.tokens[name]


def check(drive: Driver, architecture: str, name: str, prompt: str | list[int], count: int) -> None:
    key = prompt if isinstance(prompt, str) else tuple(prompt)
    assert drive.tokens[name] == expected(architecture, key, count)


def test_a_guest_and_its_host_give_their_own_tokens(drive: Driver, architecture: str) -> None:
    drive.add("host", PROMPTS[0], 40)
    drive.until(drive.generated("host", 5))
    drive.add("guest", CHUNKED, 20)
    drive.run()
    check(drive, architecture, "host", PROMPTS[0], 40)
    check(drive, architecture, "guest", CHUNKED, 20)
    between = drive.log[: drive.log.index("guest")].count("host")
    assert between > 5 + len(drive.prefill["guest"]) // 2, "the host decoded while the guest was prefilled"


def test_a_short_guest_has_its_first_token_in_one_step(drive: Driver, architecture: str) -> None:
    drive.add("host", PROMPTS[0], 40)
    drive.until(drive.generated("host", 5))
    drive.add("guest", PROMPTS[1], 10)
    drive.step()
    assert len(drive.tokens["guest"]) == 1
    drive.run()
    check(drive, architecture, "guest", PROMPTS[1], 10)
    check(drive, architecture, "host", PROMPTS[0], 40)


def test_company_for_a_guest_takes_it_along_into_the_batch(drive: Driver, architecture: str) -> None:
    drive.add("host", PROMPTS[0], 40)
    drive.until(drive.generated("host", 5))
    drive.add("guest", CHUNKED, 12)
    drive.until(lambda: in_prefill(drive, "guest"))
    drive.add("probe", PROMPTS[1], 12)
    drive.run()
    assert drive.log.index("probe") < drive.log.index("guest"), "a short prompt does not wait for a long one"
    check(drive, architecture, "host", PROMPTS[0], 40)
    check(drive, architecture, "guest", CHUNKED, 12)
    check(drive, architecture, "probe", PROMPTS[1], 12)


def test_a_guest_whose_host_ends_goes_on_alone(drive: Driver, architecture: str) -> None:
    drive.add("host", PROMPTS[0], 7)
    drive.until(drive.generated("host", 5))
    drive.add("guest", CHUNKED, 12)
    drive.until(lambda: in_prefill(drive, "guest"))
    drive.drop("host")
    drive.run()
    check(drive, architecture, "guest", CHUNKED, 12)
    assert drive.engine.served(b"guest").engine == "text"


def test_a_guest_is_cancelled_in_its_prefill(drive: Driver, architecture: str) -> None:
    drive.add("host", PROMPTS[0], 30)
    drive.until(drive.generated("host", 5))
    drive.add("guest", CHUNKED, 12)
    drive.until(lambda: in_prefill(drive, "guest"))
    assert drive.drop("guest")
    drive.add("next", PROMPTS[1], 8)
    drive.run()
    check(drive, architecture, "host", PROMPTS[0], 30)
    check(drive, architecture, "next", PROMPTS[1], 8)


def test_a_guest_of_one_token_never_joins(drive: Driver, architecture: str) -> None:
    drive.add("host", PROMPTS[0], 30)
    drive.until(drive.generated("host", 5))
    drive.add("guest", PROMPTS[1], 1)
    drive.run()
    check(drive, architecture, "guest", PROMPTS[1], 1)
    check(drive, architecture, "host", PROMPTS[0], 30)
    assert drive.engine.served(b"host").engine == "text"


def test_guests_of_a_batch(drive: Driver, architecture: str) -> None:
    for name in ("a", "b", "c"):
        drive.add(name, PROMPTS[0], 40)
    drive.until(drive.generated("c", 4))
    drive.add("guest", CHUNKED, 12)
    drive.until(drive.generated("guest", 2))
    drive.add("late", PROMPTS[1], 12)
    drive.run()
    for name in ("a", "b", "c"):
        check(drive, architecture, name, PROMPTS[0], 40)
    check(drive, architecture, "guest", CHUNKED, 12)
    check(drive, architecture, "late", PROMPTS[1], 12)


def long(number: int) -> list[int]:
    return [300 + (7 * place + number) % 450 for place in range(420 + number)]


@pytest.mark.parametrize(("many", "hosted"), [(1, False), (8, True)])
def test_a_short_prompt_never_waits_for_long_ones(drive: Driver, architecture: str, many: int, hosted: bool) -> None:
    """Field report G02: of any number of long prompts."""
    if hosted:
        drive.add("host", PROMPTS[0], 60)
        drive.until(drive.generated("host", 5))
    for number in range(many):
        drive.add(f"long {number}", long(number), 2)
    drive.step()
    drive.add("short", PROMPTS[1], 6)
    for _ in range(3):
        drive.step()
    assert drive.tokens["short"]
    assert not any(drive.tokens[f"long {number}"] for number in range(many))
    drive.run()
    check(drive, architecture, "short", PROMPTS[1], 6)
    for number in range(many):
        check(drive, architecture, f"long {number}", long(number), 2)
    if hosted:
        check(drive, architecture, "host", PROMPTS[0], 60)


def test_a_guest_gives_way_to_a_shorter_one(drive: Driver, architecture: str) -> None:
    for number in range(9):
        drive.add(f"long {number}", long(number), 2)
    drive.step()
    drive.add("guest", CHUNKED[:200], 6)
    drive.until(lambda: in_prefill(drive, "guest"))
    drive.add("short", PROMPTS[1], 6)
    drive.step()
    assert drive.tokens["short"]
    assert not drive.tokens["guest"]
    drive.run()
    assert drive.log.index("guest") < min(drive.log.index(f"long {number}") for number in range(9))
    check(drive, architecture, "guest", CHUNKED[:200], 6)
    check(drive, architecture, "short", PROMPTS[1], 6)
    for number in range(9):
        check(drive, architecture, f"long {number}", long(number), 2)


def test_one_of_the_same_length_waits_for_room(drive: Driver, architecture: str) -> None:
    for number in range(10):
        drive.add(f"long {number}", long(0), 2)
    drive.add("last", long(0), 2)
    assert drive.drop("long 8")
    drive.until(lambda: drive.prefill["long 0"] != [] and drive.prefill["long 0"][-1][0] == len(long(0)))
    assert not drive.prefill["last"]
    drive.run()
    check(drive, architecture, "long 9", long(0), 2)
    check(drive, architecture, "last", long(0), 2)


def test_what_a_guest_that_gave_way_has_computed_is_kept() -> None:
    engine = open_tiny(cache_entries=16)
    drive = Driver(engine)
    for number in range(8):
        drive.add(f"long {number}", long(number), 2)
    drive.step()
    drive.add("guest", CHUNKED[:200], 6)
    drive.until(lambda: in_prefill(drive, "guest"))
    drive.add("short", PROMPTS[1], 6)
    drive.step()
    done = drive.prefill["guest"][-1][0]
    assert drive.drop("guest")
    drive.run()
    drive.add("again", CHUNKED[:200], 6)
    drive.run()
    assert drive.cached["again"] == done
    check(drive, "qwen3", "again", CHUNKED[:200], 6)
    engine.close()
