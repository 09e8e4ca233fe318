"""Rates that an operator sets: what counts, how refusals look, and what tokens have of their own."""

from collections.abc import Iterator

import httpx
import pytest
from support.live_service import DIM, Live, image_input, live_service, picture, vectors

from plsc.errors import UsageError
from plsc.serve.errors import ApiError
from plsc.serve.limits import RateLimiter, charge, parse_rate_limits, rate_headers

pytestmark = pytest.mark.live


def test_forms_of_limits():
    for text, count, seconds in (("searches=50", 50, 1), ("searches=50/s", 50, 1), ("writes=600/m", 600, 60)):
        (limit,) = parse_rate_limits([text])
        assert (limit.count, limit.seconds) == (count, seconds)
        assert parse_rate_limits([str(limit)]) == (limit,)
    for wrong in (
        "",
        *["searches", "searches=0", "searches=-1", "searches=1.5", "looks=3", "searches=5/d", "searches=５", "x"],
    ):
        with pytest.raises(UsageError, match="no rate limit"):
            parse_rate_limits([wrong])
    with pytest.raises(UsageError, match="twice"):
        parse_rate_limits(["searches=1", "searches=2"])


def test_a_bucket_is_refilled_evenly(clock):
    refused = []
    limiter = RateLimiter((), lambda *what: refused.append(what), clock)
    own = parse_rate_limits(["searches=60/m"])
    for _ in range(60):
        limiter.admit("camera", own, "searches")
    with pytest.raises(ApiError) as told:
        limiter.admit("camera", own, "searches")
    assert (told.value.status_code, told.value.headers["Retry-After"]) == (429, "1")
    clock.now += 1.0
    assert limiter.admit("camera", own, "searches")
    with pytest.raises(ApiError):
        limiter.admit("camera", own, "searches")
    assert not limiter.admit("camera", own, "writes")
    assert limiter.admit("other", own, "searches")
    clock.now += 3600.0  # no more than the bucket holds
    allowance = limiter.admit("camera", own, "searches")
    assert dict(rate_headers(allowance))[b"ratelimit"] == b'"searches";r=59;t=1'
    charge(101)
    with pytest.raises(ApiError) as told:
        limiter.admit("camera", own, "searches")
    assert told.value.headers["Retry-After"] == "42"  # the debt of 41, and one to take
    assert refused == [("camera", "searches")] * 3


def test_a_token_that_is_changed_has_its_new_limits_at_once(clock):
    limiter = RateLimiter(parse_rate_limits(["requests=1"]), lambda *_: None, clock)
    limiter.admit("camera", (), "searches")
    with pytest.raises(ApiError):
        limiter.admit("camera", (), "searches")
    own = parse_rate_limits(["requests=5"])
    for _ in range(5):
        limiter.admit("camera", own, "searches")
    with pytest.raises(ApiError):
        limiter.admit("camera", own, "searches")


@pytest.fixture(scope="module")
def limited(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """A service whose tokens have hourly limits, which refill too slowly to matter in a test."""
    rights = ["vectors", "embeddings"]
    callers = {
        "root": {"role": "admin", "rates": ["requests=100000/h", "searches=100000", "writes=100000"]},
        "camera": {"role": "search", "rates": ["searches=3/h"]},
        "batcher": {"role": "search", "allow": rights, "rates": ["searches=300/h", "embeddings=4/h"]},
        "default": {"role": "write", "allow": rights},
        "busy": {"role": "read", "rates": ["requests=2/h"]},
    }
    defaults = parse_rate_limits(["writes=4/h"])
    folder = tmp_path_factory.mktemp("limited")
    with live_service(folder, callers=callers, rate_limits=defaults, metrics_port=0) as live:
        live.collection("staff")
        yield live


def ask(limited: Live, name: str, method: str, path: str, body: object = None) -> httpx.Response:
    return limited.ask(method, path, body, by=name)


SEARCH, PERSONS = "/v1/collections/staff/search", "/v1/collections/staff/persons"


def test_a_caller_is_told_and_then_refused(limited):
    body = {"query": image_input(picture(1))}
    answers = [ask(limited, "camera", "POST", SEARCH, body) for _ in range(4)]
    assert [answer.status_code for answer in answers] == [200, 200, 200, 429]
    assert [answer.headers["RateLimit-Policy"] for answer in answers] == ['"searches";q=3;w=3600'] * 4
    assert [answer.headers["RateLimit"].split(";")[1] for answer in answers] == ["r=2", "r=1", "r=0", "r=0"]
    refused = answers[-1].json()["error"]
    assert refused["code"] == "too_many"
    assert "the token camera has used up its searches=3/h" in refused["message"]
    assert 1100 <= int(answers[-1].headers["Retry-After"]) <= 1200
    pair = {"a": image_input(picture(1)), "b": image_input(picture(2))}
    assert ask(limited, "camera", "POST", "/v1/compare", pair).status_code == 429
    info = ask(limited, "camera", "GET", "/v1/info")  # other requests go on
    assert (info.status_code, info.json()["rate_limits"]) == (200, ["searches=3/h", "writes=4/h"])
    assert "RateLimit" not in info.headers


def test_the_queries_of_a_request_count_each(limited):
    queries = [{"vector": row.tolist()} for row in vectors(200)]
    first = ask(limited, "batcher", "POST", SEARCH, {"queries": queries, "k": 1})
    assert (first.status_code, first.headers["RateLimit"].split(";")[1]) == (200, "r=100")
    assert ask(limited, "batcher", "POST", SEARCH, {"queries": queries, "k": 1}).status_code == 200  # into debt
    assert ask(limited, "batcher", "POST", SEARCH, {"query": queries[0]}).status_code == 429
    tensor = {"name": "images", "datatype": "UINT8", "shape": [3, 3, 16, 16], "data": [7] * 768 * 3}
    assert ask(limited, "batcher", "POST", "/v2/models/linear/infer", {"inputs": [tensor]}).status_code == 200
    several = {"inputs": [image_input(picture(1)), image_input(picture(2))]}
    assert ask(limited, "batcher", "POST", "/v1/embeddings", several).status_code == 200
    refused = ask(limited, "batcher", "POST", "/v2/models/linear/infer", {"inputs": [tensor]})
    assert refused.status_code == 429
    assert "embeddings=4/h" in refused.json()["error"]  # in the protocol's own shape


def test_the_services_limits_hold_where_a_token_has_none(limited):
    persons = {"persons": [{"faces": [{"vector": [1.0] * DIM}]} for _ in range(4)]}
    assert ask(limited, "default", "POST", PERSONS, persons).status_code == 201
    assert ask(limited, "default", "DELETE", f"{PERSONS}/1").status_code == 429
    assert ask(limited, "default", "GET", PERSONS).status_code == 200
    assert ask(limited, "root", "DELETE", f"{PERSONS}/1").status_code == 204


def test_all_requests_together_can_be_limited_and_metrics_tell(limited):
    statuses = [ask(limited, "busy", "GET", path).status_code for path in ("/v1/info", "/v1/nothing", "/v1/info")]
    assert statuses == [200, 404, 429]
    shown = httpx.get(limited.server.metrics_address).text
    assert 'plsc_throttled_total{kind="requests",token="busy"} 1.0' in shown
    assert "plsc_limit_writes_per_second 0.00111" in shown
    assert "plsc_limit_answer_bytes 1.6777216e+07" in shown


def test_without_tokens_this_machine_is_one_caller(tmp_path):
    with live_service(tmp_path, rate_limits=parse_rate_limits(["requests=2/h"])) as live:
        assert [live.ask("GET", "/v1/info").status_code for _ in range(3)] == [200, 200, 429]
        assert live.ask("GET", "/health/ready").status_code == 200


def test_a_token_expires(tmp_path):
    ends = {"past": "2026-01-01", "future": "2999-01-01T12:00:00+02:00"}
    callers = {name: {"role": "admin", "expires": end} for name, end in ends.items()}
    with live_service(tmp_path, callers=callers) as live:
        refused = live.ask("GET", "/v1/info")
        assert refused.status_code == 401
        assert "the token past has expired (2026-01-01)" in refused.json()["error"]["message"]
        assert live.ask("GET", "/v1/info", by="future").status_code == 200
