"""For teaching: a notebook, exercises, and the equations as plain loops."""
