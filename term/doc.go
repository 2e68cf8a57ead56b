// Package term draws on a terminal, and prints text safely.
//
// It has charts and sparklines (Chart, Sparkline), aligned tables (Table), a screen for
// live views (Screen), colors, and numbers and times as people read them (Value, Bytes,
// Ago). SafeLine and SafeText make text from other machines safe to show: no control or
// bidirectional formatting character of it reaches the terminal.
//
//	t := term.NewTable(os.Stdout, "NAME", "SIZE")
//	t.Row(name, term.Bytes(size))
//	err := t.Flush()
//
// Functions that need a terminal take it as an io.Writer and decide by what it is: a file
// gets no color and no escape sequence.
//
// The package imports nothing else of this module and reads no flags. Width is counted in
// runes: each character is assumed to take one column.
package term
