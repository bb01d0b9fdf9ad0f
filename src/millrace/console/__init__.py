"""The console: a web page for people who look after a cluster, millrace's or any Kafka.

It is a client like any other, in a process of its own (`millrace console`): no broker ever waits for it. Everything is
rendered here and arrives as HTML; htmx replaces parts of a page, a small script of our own draws charts and reads
server-sent events. There is nothing to build.

The rooms:

- `settings`: what a console is told when it starts; `login`: who has to say who they are, and how
- `sessions`: who is there, with what rights, and their clients of the cluster; `roles`: what each may do here
- `web`: how a page comes about: a function that is given a `Page` and returns a response. It runs in a thread and may
  block. The session, the role, CSRF and errors are seen to before and after it, in one place
- `app`: all pages as one application, with the headers that browsers are to obey; `serving`: the process
- `listing`: tables that are searched, sorted and cut into pages here, whatever their length
- `monitor`: what is asked of the cluster again and again while somebody looks, kept for lists and charts
- `pages`: one module for each page, with its templates of the same name in `templates`
- `records`: reading records: scans, filters, decoders, live tail, downloads, sending

A new page: a module in `pages` with functions decorated by `web.page`, named in `pages.ALL`, and a template that
extends `layout.html`. What it asks of the cluster belongs in `millrace.admin`.
"""
