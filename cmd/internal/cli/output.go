package cli

import (
	"github.com/spf13/cobra"

	"agentctl/term"
)

// Output is how a command prints what it read: as text for people, or as data.
//
// Data goes to stdout and everything else to stderr, so that a pipe gets data alone. The data
// of -o json is the struct that the command decoded, and is kept compatible for scripts.
type Output struct {
	Format string // json, yaml, ndjson; "" is text
}

// AddFlags adds -o and --json.
func (o *Output) AddFlags(c *cobra.Command) {
	c.Flags().VarP(&term.FormatFlag{Format: &o.Format, Allowed: []string{"json", "yaml", "ndjson"}}, "output", "o", "print `FORMAT` instead of text: json, yaml or ndjson")
	AddJSONFlag(c, &o.Format)
}

// AddStreamFlags adds -o for a command that prints a stream: text, or one JSON value a line.
func (o *Output) AddStreamFlags(c *cobra.Command) {
	c.Flags().VarP(&term.FormatFlag{Format: &o.Format, Allowed: []string{"ndjson"}}, "output", "o", "print `FORMAT` also on a terminal: ndjson")
}

// IsText reports whether a streaming command prints for people: on a terminal, unless -o
// says otherwise.
func (o *Output) IsText(cmd *cobra.Command) bool {
	return o.Format == "" && term.AsTerminal(cmd.OutOrStdout()) != nil
}

// AddJSONFlag adds --json, which is short for -o json.
func AddJSONFlag(c *cobra.Command, to *string) {
	c.Flags().Var(&term.JSONFlag{Format: to}, "json", "short for -o json")
	c.Flags().Lookup("json").NoOptDefVal = "true"
}

// Print writes v in the chosen format, or calls text. On a terminal it escapes characters in data that
// could control the terminal (term.JSONWriter). text does that for what it prints.
func (o *Output) Print(cmd *cobra.Command, v any, text func() error) error {
	if o.Format == "" {
		return text()
	}
	return term.WriteData(term.JSONWriter(cmd.OutOrStdout()), o.Format, v)
}

// PrintList is Print for a list, of which ndjson prints one element a line. The caller passes an empty list
// and not nil, which would be null in JSON.
func PrintList[T any](o *Output, cmd *cobra.Command, list []T, text func() error) error {
	if o.Format != "ndjson" {
		return o.Print(cmd, list, text)
	}
	for i := range list {
		if err := o.Print(cmd, &list[i], nil); err != nil {
			return err
		}
	}
	return nil
}
