package term

import (
	"fmt"
	"io"
	"text/tabwriter"
)

// Table prints rows under a header, in columns that are as wide as their widest cell. It
// holds the rows in memory until Flush; a long listing flushes periodically, and its columns
// may then change their width. Flush returns write errors.
type Table struct{ w *tabwriter.Writer }

// NewTable starts a table with these column titles.
func NewTable(w io.Writer, columns ...any) Table {
	t := Table{tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)}
	t.Row(columns...)
	return t
}

// Row adds a row. Cells are printed as by fmt.Sprint and made safe by SafeLine.
func (t Table) Row(cells ...any) {
	for i, cell := range cells {
		if i > 0 {
			_, _ = io.WriteString(t.w, "\t")
		}
		_, _ = io.WriteString(t.w, SafeLine(fmt.Sprint(cell)))
	}
	_, _ = io.WriteString(t.w, "\n")
}

// Flush prints the rows added since the last Flush, and returns the first error of writing.
func (t Table) Flush() error { return t.w.Flush() }
