"""Live views of jobs: `distrun top` and `distrun status -w` on a terminal, `distrun dashboard` in a browser.

* Both show a `model` of each job, which `feed` keeps up to date with the frames of `source`. `events` has the words,
  `rows` the tables, `text` lines and charts.
* Terminal: `loop.watch` shows one job, `jobs.watch` a table of jobs, from which the user can open one; `loop.follow`
  prints a line for each change. `view` draws the picture, `user` knows the keys, `terminal` takes the screen.
* Browser: `web` serves the files of `page/` and what they show, which `page.py` makes of the model.
"""
