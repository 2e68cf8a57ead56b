// Package term draws on a terminal, and prints text safely.
//
// It has charts and sparklines (Chart, Sparkline), aligned tables (Table), a screen for
// live views (Screen), colors, and numbers and times as people read them (Value, Bytes,
// Ago). SafeLine and SafeText make text from other machines safe to show: they replace its
// control and bidirectional formatting characters.
//
//	t := term.NewTable(os.Stdout, "NAME", "SIZE")
//	t.Row(name, term.Bytes(size))
//	err := t.Flush()
//
// Functions that draw take an io.Writer and check whether it is a terminal: a file gets no
// color and no escape sequences.
//
// The package imports no other package of this module and reads no flags. Width is counted in
// runes: each character is assumed to take one column.
package term
