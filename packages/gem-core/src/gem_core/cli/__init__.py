"""The ``gem`` command: one file for each sub-command, imported when it is used."""
