package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"text/tabwriter"

	"github.com/spf13/cobra"

	"agentctl/config"
	"agentctl/control"
	"agentctl/suggest"
)

// configFlags say which configuration a command is about.
type configFlags struct {
	path, stateDir, socket string
}

func (f *configFlags) add(c *cobra.Command) {
	c.Flags().StringVar(&f.path, "config", env("AGENTCTL_CONFIG", ""), "configuration `FILE`; then no daemon is asked [AGENTCTL_CONFIG]")
	c.Flags().StringVar(&f.stateDir, "state-dir", "", "`DIR` of the daemon's state; then no daemon is asked [AGENTCTL_STATE_DIR]")
	c.Flags().StringVar(&f.socket, "socket", "", "`PATH` of the control socket [AGENTCTL_SOCKET]")
}

// source is the configuration as the files and the environment of this person give it.
func (f *configFlags) source() (config.Source, error) {
	s := config.ClientSource(f.path)
	for name, text := range map[string]string{"state_dir": f.stateDir, "socket": f.socket} {
		if text == "" {
			continue
		}
		v, err := config.FindKey(name).Parse(text)
		if err != nil {
			return s, exit(exitUsage, "%w", err)
		}
		s.Flags[name] = config.Setting{Value: v, Origin: "--" + flagName(name)}
	}
	return s, nil
}

// dial connects to the daemon; nil when there is none, or files were named.
func (f *configFlags) dial(ctx context.Context) (*control.Client, error) {
	if f.path != "" || f.stateDir != "" {
		return nil, nil
	}
	socket := f.socket
	if socket == "" {
		socket = env("AGENTCTL_SOCKET", config.ClientSocket())
	}
	cl, err := control.Dial(ctx, socket)
	if errors.Is(err, control.ErrNotRunning) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	return cl, nil
}

// View is the daemon's configuration, or that of the files, and where it comes from.
func (f *configFlags) view(ctx context.Context) (v config.View, of string, err error) {
	cl, err := f.dial(ctx)
	if err != nil {
		return v, "", err
	}
	if cl != nil {
		defer func() { _ = cl.Close() }()
		if err := cl.Call(ctx, control.MethodGetConfig, nil, &v); err != nil {
			return v, "", err
		}
		return v, "the daemon", nil
	}
	s, err := f.source()
	if err != nil {
		return v, "", err
	}
	c, err := s.Load()
	if err != nil {
		return v, "", exit(exitFailure, "%w", err)
	}
	return c.View(), "the files; no daemon was asked", nil
}

func newConfig() *cobra.Command {
	c := &cobra.Command{
		Use:   "config",
		Short: "Show, check and change the settings of the daemon",
		Long: `Show, check and change the settings of the daemon: those it runs with where one runs,
else those of the files. docs/config.md lists all keys.`,
		Example: "  agentctl config show --origin\n  agentctl config set base_interval_ms 5000\n  agentctl config validate",
	}
	c.AddCommand(newConfigShow(), newConfigGet(), newConfigSet(), newConfigUnset(), newConfigValidate(), newConfigSchema())
	return c
}

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
	c.Flags().BoolVar(&origin, "origin", false, "tell where each value comes from")
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
		fmt.Fprintf(w, "The files are wrong now, the settings before are in force:\n%s\n", v.Error)
	}
	if len(v.Restart) > 0 {
		fmt.Fprintf(w, "Changed, but only in force after a restart: %s.\n", strings.Join(v.Restart, ", "))
	}
	return nil
}

// valueLine is a value of a view on one line.
func valueLine(v any, name string) string {
	switch v := v.(type) {
	case nil:
		return "-"
	case string:
		if v == "" {
			return "-"
		}
		return v
	case []string:
		return wordsText(v)
	case []any:
		if name == "alerts.rules" {
			return fmt.Sprintf("%d rules", len(v))
		}
		var words []string
		for _, w := range v {
			words = append(words, fmt.Sprint(w))
		}
		return wordsText(words)
	case []config.RuleText:
		return fmt.Sprintf("%d rules", len(v))
	case float64: // from JSON
		v2 := int64(v)
		if strings.HasPrefix(name, "module_intervals.") && v2 == 0 {
			return "-"
		}
		return fmt.Sprint(v2)
	case int64:
		if strings.HasPrefix(name, "module_intervals.") && v == 0 {
			return "-"
		}
	}
	return fmt.Sprint(v)
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
					return writeYAML(cmd.OutOrStdout(), v.Values[k.Name])
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

func needKey(name string) (*config.Key, error) {
	if k := config.FindKey(name); k != nil {
		return k, nil
	}
	hint := suggest.Hint(name, config.KeyNames())
	if hint == "" {
		hint = "; the keys are " + strings.Join(config.KeyNames(), ", ")
	}
	return nil, exit(exitUsage, "unknown key %.64q%s", name, hint)
}

func completeKeys(_ *cobra.Command, args []string, toComplete string) ([]string, cobra.ShellCompDirective) {
	if len(args) > 0 {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	return slices.DeleteFunc(config.KeyNames(), func(k string) bool { return !strings.HasPrefix(k, toComplete) }), cobra.ShellCompDirectiveNoFileComp
}

// completeSetting completes a key, and its value where there are words for it.
func completeSetting(c *cobra.Command, args []string, toComplete string) ([]string, cobra.ShellCompDirective) {
	if len(args) != 1 {
		return completeKeys(c, args, toComplete)
	}
	k := config.FindKey(args[0])
	if k == nil {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	words := slices.Clone(k.Words)
	if k.Kind == config.KindBool {
		words = []string{"true", "false"}
	}
	return slices.DeleteFunc(words, func(w string) bool { return !strings.HasPrefix(w, toComplete) }), cobra.ShellCompDirectiveNoFileComp
}

func newConfigValidate() *cobra.Command {
	var f configFlags
	c := &cobra.Command{
		Use:     "validate [FILE]",
		Short:   "Check a configuration file, or all that the daemon would read",
		Example: "  agentctl config validate\n  agentctl config validate new.yaml",
		Args:    cobra.MaximumNArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			if len(args) == 1 {
				given, errs := config.ReadFile(args[0])
				if len(errs) > 0 {
					return exit(exitFailure, "%w", errs)
				}
				fmt.Fprintf(cmd.OutOrStdout(), "%s is good: %d settings\n", args[0], len(given))
				return nil
			}
			s, err := f.source()
			if err != nil {
				return err
			}
			loaded, err := s.Load()
			if err != nil {
				return exit(exitFailure, "%w", err)
			}
			for _, note := range loaded.Notes {
				fmt.Fprintln(cmd.ErrOrStderr(), "agentctl: "+note)
			}
			files := "there is no file: all settings are defaults or from the environment; write " + s.Path
			if len(loaded.Files) > 0 {
				files = strings.Join(loaded.Files, "\n")
			}
			fmt.Fprintf(cmd.OutOrStdout(), "%s\ngood\n", files)
			return nil
		},
	}
	f.add(c)
	return c
}

func newConfigSchema() *cobra.Command {
	return &cobra.Command{
		Use:     "schema",
		Short:   "Print the JSON Schema of a configuration file",
		Example: "  agentctl config schema > config.schema.json",
		RunE: func(cmd *cobra.Command, _ []string) error {
			b, err := config.SchemaJSON()
			if err != nil {
				return err
			}
			_, err = cmd.OutOrStdout().Write(b)
			return err
		},
	}
}
