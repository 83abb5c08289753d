"""The API's own description, and schemathesis, which reads it and sends what follows from it and what does not."""
import json
import time

import pytest
import schemathesis
from front_tiny import ARGS, make_folder
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.specs.openapi import checks
from server_tiny import is_at_rest, serve_in_thread

from minengine.config import EngineArgs
from minengine.server.launcher import make_async_engine


@pytest.fixture(scope="module", params=["v0", "v1"])
def server(request, tmp_path_factory):
    folder = make_folder(tmp_path_factory.mktemp("schema") / "tiny")
    args = EngineArgs(folder, engine=request.param, enable_multiprocessing=False, **ARGS)
    with serve_in_thread(make_async_engine(args)) as server: yield server


def mend(case):
    "What no schema says: which model there is, and prompts that it takes. The other fields stay as they are."
    if not isinstance(case.body, dict): return
    case.body["model"] = "tiny"
    if case.path.startswith("/v1/"): case.body["max_tokens"] = 4   # to the window's end, 300 times over, takes its time
    if isinstance(case.body.get("n"), int): case.body["n"] = min(case.body["n"], 4)
    if "prompt" in case.body: case.body["prompt"] = "abc"
    if "messages" in case.body: case.body["messages"] = [{"role": "user", "content": "hi"}]
    if "tokens" in case.body: case.body["tokens"] = [97, 98]
    for name, value in case.body.items():   # 7.0 is an integer to a schema
        if isinstance(value, float) and value == int(value): case.body[name] = int(value)


# What comes back is what the description says.
CONFORMS = [checks.response_schema_conformance, checks.content_type_conformance, checks.status_code_conformance]


def explore(server, mode, num_examples):
    config = schemathesis.Config.from_dict({"generation": {"mode": mode.split()[0]}, "request-timeout": 20})
    seen = set()
    schema = schemathesis.openapi.from_url(server.url + "/openapi.json", config=config)
    operations = [result.ok() for result in schema.get_all_operations()]
    assert len(operations) == 9
    for operation in operations:
        @settings(max_examples=num_examples, deadline=None, database=None, derandomize=True,
                  phases=[Phase.explicit, Phase.generate], suppress_health_check=list(HealthCheck))
        @given(case=operation.as_strategy())
        def check(case):
            if mode == "positive mended": mend(case)
            response = case.call(timeout=20)
            assert response.status_code < 500, (case.as_curl_command(), response.text)
            case.validate_response(response, checks=CONFORMS)
            seen.add(response.status_code)
            if response.status_code == 200: return
            error = response.json()["error"]
            assert set(error) == {"message", "type", "param", "code"} and error["message"], response.text
        check()
    return seen


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("mode", ["positive", "positive mended", "negative"])
def test_schemathesis(server, mode):
    assert explore(server, mode, 10) <= {200, 400, 404, 405, 413, 415}
    import urllib.request
    body = json.dumps({"model": "tiny", "prompt": "abc", "max_tokens": 3}).encode()
    request = urllib.request.Request(server.url + "/v1/completions", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=10) as response:   # unharmed
        assert json.load(response)["usage"]["completion_tokens"] <= 3
    deadline = time.monotonic() + 20
    while not is_at_rest(server.engine):
        assert time.monotonic() < deadline, "something still runs"
        time.sleep(0.01)
