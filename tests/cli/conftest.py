"""What several tests of commands use."""

from commands_run import console, families_of_a_file_stay_in_it, refuses, signals_keep_their_effect, small_run  # noqa: F401
