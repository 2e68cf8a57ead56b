package main

import (
	"fmt"
	"io"
	"maps"
	"strings"
	"text/tabwriter"

	"agentctl/config"
	"agentctl/term"

	"github.com/spf13/cobra"
)

func newConfigShow() *cobra.Command {
	var f configFlags
	var out output
	var origin bool
	c := &cobra.Command{
		Use:     "show",
		Short:   "Every setting, and where it comes from",
		Example: "  agentctl config show --origin\n  agentctl config show -o yaml",
		RunE: func(cmd *cobra.Command, _ []string) error {
			v, of, err := f.view(cmd.Context())
			if err != nil {
				return err
			}
			for _, note := range v.Notes {
				fmt.Fprintln(cmd.ErrOrStderr(), "agentctl: "+note)
			}
			if origin {
				return out.print(cmd, v, func() error { return printConfig(cmd.OutOrStdout(), &v, of, true) })
			}
			return out.print(cmd, givenValues(v.Values), func() error { return printConfig(cmd.OutOrStdout(), &v, of, false) })
		},
	}
	f.add(c)
	out.flags(c)
	c.Flags().BoolVar(&origin, "origin", false, "show where each value comes from")
	return c
}

func printConfig(w io.Writer, v *config.View, of string, origin bool) error {
	tw := tabwriter.NewWriter(w, 0, 8, 2, ' ', 0)
	for _, name := range config.KeyNames() {
		line := name + "\t" + valueLine(v.Values[name], name)
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
	fmt.Fprintf(w, "\nFrom %s. Read: %s.\n", of, files)
	if v.Error != "" {
		fmt.Fprintf(w, "The present files are invalid; the previous settings stay in force:\n%s\n", v.Error)
	}
	if len(v.Restart) > 0 {
		fmt.Fprintf(w, "Changed, in force after a restart: %s.\n", strings.Join(v.Restart, ", "))
	}
	return nil
}

// valueLine is a value of a view on one line, "-" for one that is left to its default. The
// values come from the files, or from the daemon as JSON.
func valueLine(v any, name string) string {
	switch list := v.(type) {
	case []config.RuleText:
		return fmt.Sprintf("%d rules", len(list))
	case []any:
		if name == "alerts.rules" {
			return fmt.Sprintf("%d rules", len(list))
		}
		words := make([]string, len(list))
		for i, w := range list {
			words[i] = fmt.Sprint(w)
		}
		return wordsText(words)
	case []string:
		return wordsText(list)
	case float64:
		v = int64(list)
	}
	text := fmt.Sprint(v)
	if v == nil || text == "" || text == "0" && strings.HasPrefix(name, "module_intervals.") {
		return "-"
	}
	return text
}

func wordsText(words []string) string {
	if len(words) == 0 {
		return "none"
	}
	return strings.Join(words, ",")
}

// givenValues are the values as a file has them, without those that are left to a default
// that no file can name.
func givenValues(values map[string]any) map[string]any {
	given := maps.Clone(values)
	maps.DeleteFunc(given, func(name string, v any) bool {
		return valueLine(v, name) == "-" && name != "relay" && name != "name"
	})
	return config.Nest(given)
}

func newConfigGet() *cobra.Command {
	var f configFlags
	var out output
	c := &cobra.Command{
		Use:               "get KEY",
		Short:             "One setting",
		Example:           "  agentctl config get base_interval_ms\n  agentctl config get alerts.rules -o json",
		Args:              cobra.ExactArgs(1),
		ValidArgsFunction: completeKeys,
		RunE: func(cmd *cobra.Command, args []string) error {
			k, err := needKey(args[0])
			if err != nil {
				return err
			}
			v, _, err := f.view(cmd.Context())
			if err != nil {
				return err
			}
			return out.print(cmd, v.Values[k.Name], func() error {
				if k.Kind == config.KindRules {
					return term.WriteYAML(cmd.OutOrStdout(), v.Values[k.Name])
				}
				text := valueLine(v.Values[k.Name], k.Name)
				if text == "-" {
					text = ""
				}
				_, err := fmt.Fprintln(cmd.OutOrStdout(), text)
				return err
			})
		},
	}
	f.add(c)
	out.flags(c)
	return c
}
