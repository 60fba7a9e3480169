"""The command ``hdpcomm``: one file a command."""
