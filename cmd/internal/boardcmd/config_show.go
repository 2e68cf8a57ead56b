//go:build linux

package boardcmd

import (
	"fmt"
	"io"
	"strings"
	"text/tabwriter"

	"github.com/spf13/cobra"

	"agentctl/cmd/internal/cli"
	"agentctl/config"
	"agentctl/term"
)

// newConfigShow returns the command config show. Without --origin its JSON and YAML have the form of a
// configuration file, so that the output can be saved as one; with it they are a config.View. Notes go to
// stderr in all formats.
func newConfigShow() *cobra.Command {
	var f configFlags
	var out cli.Output
	var origin bool
	c := &cobra.Command{
		Use:     "show",
		Short:   "Print every setting and its source",
		Example: "  agentctl config show --origin\n  agentctl config show -o yaml",
		RunE: func(cmd *cobra.Command, _ []string) error {
			v, from, err := f.view(cmd.Context())
			if err != nil {
				return err
			}
			for _, note := range v.Notes {
				fmt.Fprintln(cmd.ErrOrStderr(), "agentctl: "+note)
			}
			var data any = v.GivenValues()
			if origin {
				data = v
			}
			return out.Print(cmd, data, func() error { return printConfig(cmd.OutOrStdout(), &v, from, origin) })
		},
	}
	f.addFlags(c)
	out.AddFlags(c)
	c.Flags().BoolVar(&origin, "origin", false, "show where each value comes from")
	return c
}

// printConfig prints all keys with their values, sorted, then the files that they come from and what is
// wrong with them. from says who was asked, as configFlags.view returns it; origin adds the source of
// each value.
//
// The keys are those of this program. One that only a newer daemon has is missing here, and is in the
// JSON.
func printConfig(w io.Writer, v *config.View, from string, origin bool) error {
	tw := tabwriter.NewWriter(w, 0, 8, 2, ' ', 0)
	for _, name := range config.KeyNames() {
		line := name + "\t" + v.Text(name)
		if origin {
			line += "\t" + v.Origins[name]
		}
		fmt.Fprintln(tw, line)
	}
	if err := tw.Flush(); err != nil {
		return err
	}
	files := "no file"
	if len(v.Files) > 0 {
		files = strings.Join(v.Files, ", ")
	}
	fmt.Fprintf(w, "\nFrom %s. Read: %s.\n", from, files)
	// Only a daemon sets these two: they compare the files with what it has in force.
	if v.Error != "" {
		fmt.Fprintf(w, "The present files are invalid; the previous settings stay in force:\n%s\n", v.Error)
	}
	if len(v.Restart) > 0 {
		fmt.Fprintf(w, "Changed, in force after a restart: %s.\n", strings.Join(v.Restart, ", "))
	}
	return nil
}

// newConfigGet returns the command config get. A setting that is left to its default prints an empty line,
// so that a script can test it with [ -z ]: "-" of config.View.Text is for tables. Rules are printed as
// YAML, because they do not fit on a line; -o json prints the bare value of any key.
func newConfigGet() *cobra.Command {
	var f configFlags
	var out cli.Output
	c := &cobra.Command{
		Use:               "get KEY",
		Short:             "Print one setting",
		Example:           "  agentctl config get base_interval_ms\n  agentctl config get alerts.rules -o json",
		Args:              cobra.ExactArgs(1),
		ValidArgsFunction: completeKeys,
		RunE: withKey(func(cmd *cobra.Command, k *config.Key, _ []string) error {
			v, _, err := f.view(cmd.Context())
			if err != nil {
				return err
			}
			return out.Print(cmd, v.Values[k.Name], func() error {
				if k.Kind == config.KindRules {
					return term.WriteYAML(term.JSONWriter(cmd.OutOrStdout()), v.Values[k.Name])
				}
				_, err := fmt.Fprintln(cmd.OutOrStdout(), strings.TrimPrefix(v.Text(k.Name), "-"))
				return err
			})
		}),
	}
	f.addFlags(c)
	out.AddFlags(c)
	return c
}
