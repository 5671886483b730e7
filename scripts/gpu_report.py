"""The table of `gpu-check`: rows that are told as they come."""


class Report:
    def __init__(self, title):
        self.title, self.rows, self.is_right = title, [], True

    def add(self, what, result, detail=""):
        what = what.strip()
        self.rows.append((what, result, " ".join(str(detail).split())))
        print(f"{what}: {result}" + (f"; {detail}" if detail else ""), flush=True)

    def check(self, what, is_right, detail=""):
        self.is_right &= is_right
        self.add(what, "right" if is_right else "**WRONG**", detail)

    def figure(self, what, gb_per_s, ratio=None, of="", goal=None):
        part = f"{ratio:.2f} of {of}" if ratio is not None else ""
        if goal is not None and ratio is not None:
            part += f", goal {goal:.2f}" + ("" if ratio >= goal else ": **below**")
        self.add(what, f"{gb_per_s:.1f} GB/s", part)

    def markdown(self):
        cell = lambda text: text.replace("|", "\\|")
        rows = ["| what | result | |", "|---|---|---|"]
        return "\n".join([self.title, ""] + rows + [f"| {' | '.join(map(cell, row))} |" for row in self.rows]) + "\n"
