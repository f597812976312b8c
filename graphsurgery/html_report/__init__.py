"""Reports as one HTML file for a person who looks rather than reads: no script, nothing loaded from elsewhere.

The file is a function of the report alone, so that two runs give the same bytes. Every piece of text that comes from a
model is escaped where it enters the page (:mod:`graphsurgery.html_report.markup`).
"""

from graphsurgery.html_report.page import bench_page, inspect_page, report_page

__all__ = ["bench_page", "inspect_page", "report_page"]
