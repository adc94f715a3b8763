"""What pages share that are files or are served: one style sheet and macros. Needs jinja2.

>>> from nobackfill.pages.templates import environment
>>> line = environment(folder).from_string("{{ name }}")
>>> line.render(name="<b>")
'&lt;b&gt;'
"""
