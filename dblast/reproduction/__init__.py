"""The study: everything that regenerates the paper's figures and tables with :mod:`dblast`, which never imports it."""
