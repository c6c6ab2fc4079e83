"""Checks of a model's path and name."""

import socket
import threading
from pathlib import Path

import pytest

pytest.importorskip("transformers")

import huggingface_hub

from streamkl.integrations.transformers.checkpoint import check_checkpoint


def test_a_hub_that_does_not_answer_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    server = socket.create_server(("127.0.0.1", 0))
    asked = []

    def hang_up() -> None:
        while True:
            try:
                connection, _ = server.accept()
            except OSError:
                return
            asked.append(connection.recv(1 << 16).split()[:2])
            connection.close()

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    urls = f"http://127.0.0.1:{server.getsockname()[1]}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    monkeypatch.setattr(huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", urls)
    thread = threading.Thread(target=hang_up, daemon=True)
    thread.start()
    with pytest.raises(
        ValueError, match=r"there is no folder nobody/nothing, and the hub does not give its config\.json: "
    ):
        check_checkpoint("nobody/nothing")
    server.shutdown(socket.SHUT_RDWR)
    server.close()
    thread.join(10)
    assert asked == [[b"HEAD", b"/nobody/nothing/resolve/main/config.json"]]


def test_a_path_that_is_no_folder_of_a_model_is_refused(tmp_path: Path) -> None:
    for path, message in (
        ("no/such/model", "there is no folder no/such/model, so no model"),
        (str(tmp_path), "has no config.json: it is no model of transformers"),
    ):
        with pytest.raises(ValueError, match=message):
            check_checkpoint(path)
