"""What people do in the console, on a real cluster that begins with no camera: by pointer, by touch, by keyboard."""

import console_tasks
import pytest

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]


def test_every_task_is_done_and_the_first_answer_comes_soon(tmp_path, chromium):
    with console_tasks.serve(tmp_path) as url:
        for kind, options in console_tasks.KINDS.items():
            context = chromium.new_context(**options)
            context.set_default_timeout(console_tasks.PATIENCE_MS)
            try:
                rows = console_tasks.do_tasks(context.new_page(), url, kind)
            finally:
                context.close()
            assert not [row for row in rows if not row["done"]]
            assert [row["task"] for row in rows][:2] == ["add a camera", "first answer"]
