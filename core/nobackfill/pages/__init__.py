"""Share one style sheet and macros among all pages, files or served ones; needs jinja2.

>>> from nobackfill.pages.templates import template_environment
>>> line = template_environment(folder).from_string("{{ name }}")
>>> line.render(name="<b>")
'&lt;b&gt;'
"""
