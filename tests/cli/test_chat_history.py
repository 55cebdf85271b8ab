"""What stands before the messages of a user: the history of a file, as the data of the run are read."""

import json

from record_forms import ASKED, BRIEF, SAID
from refusals import refused

from moezoo.cli.chats import begin_chat


def test_a_history_is_read_as_the_data_of_the_run(tmp_path):
    """By its key of messages and its names of roles, in any form and kind of file."""
    talk = [{"from": "customer", "value": "1+2?"}, {"from": "agent", "value": "3"}]
    path = tmp_path / "history.json"
    path.write_text(json.dumps({"talk": talk}, indent=1))
    roles = {"customer": "user", "agent": "assistant"}
    assert begin_chat(str(path), "Be brief.", {}, field="talk", roles=roles).messages == [BRIEF, ASKED, SAID]
    with refused(f"history={path} line 1: message 1 has role", "data.roles.customer=ROLE"):
        begin_chat(str(path), None, {}, field="talk", roles={})
    path.write_text(json.dumps([{"question": "1+2?", "answer": "3"}]))
    assert begin_chat(str(path), None, {}, field="messages", roles={}).messages == [ASKED, SAID]
