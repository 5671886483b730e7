"""The table of `gpu-check`: each row is printed and written at once."""

import os


class Report:
    """A table whose rows so far are always in the file `path`. A log beside it has the output of failed steps."""

    def __init__(self, title, path):
        self.title, self.path, self.rows, self.is_right = title, path, [], True
        self.log_path = path.with_suffix(".log")
        self.log_path.write_text("")

    def add(self, what, result, detail=""):
        what = what.strip()
        self.rows.append((what, str(result), " ".join(str(detail).split())))
        print(f"{what}: {result}" + (f"; {detail}" if detail else ""), flush=True)
        whole = self.path.with_suffix(".part")
        whole.write_text(self.markdown())
        os.replace(whole, self.path)

    def check(self, what, is_right, detail=""):
        self.is_right &= is_right
        self.add(what, "right" if is_right else "**WRONG**", detail)

    def log(self, what, text):
        with open(self.log_path, "a") as file:
            file.write(f"---- {what}\n{text}\n\n")

    def figure(self, what, gb_per_s, ratio=None, of="", goal=None):
        part = f"{ratio:.2f} of {of}" if ratio is not None else ""
        if goal is not None and ratio is not None:
            part += f", goal {goal:.2f}" + ("" if ratio >= goal else ": **below**")
        self.add(what, f"{gb_per_s:.1f} GB/s", part)

    def markdown(self):
        cell = lambda text: text.replace("|", "\\|")
        rows = ["| what | result | |", "|---|---|---|"]
        return "\n".join([self.title, ""] + rows + [f"| {' | '.join(map(cell, row))} |" for row in self.rows]) + "\n"
