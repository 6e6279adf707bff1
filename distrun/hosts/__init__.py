"""The hosts that the user names: files in one grammar for all launchers' files, lists, what queue systems say.

`parse.find` reads them. What they are is in `grammar`, node lists are in `ranges`.
"""
