"""Pictures of a graph: a tree of text, a drawing and a page, all made from one `Diagram`."""
