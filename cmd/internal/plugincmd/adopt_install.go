//go:build linux

package plugincmd

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"strings"

	"github.com/rogpeppe/go-internal/diff"
	"github.com/spf13/cobra"

	"agentctl/client"
	"agentctl/cmd/internal/cli"
	"agentctl/relay/plugins/process"
	"agentctl/term"
)

// prepare makes the command one that starts without the network and from any directory. A package of
// npx is installed in a folder beside the plugin's, which replaces what was there at the end.
func (a *adoption) prepare(cmd *cobra.Command, m *process.PluginManifest) error {
	pkg, args, isNPX, err := process.NPXPackage(m.Command)
	if err != nil {
		return cli.Errorf(cli.ExitUsage, "%w", err)
	}
	// Needed without a package too: the server starts there, so that a failure leaves no plugin's folder.
	if a.stage, err = process.NewStage(a.pluginDir); err != nil {
		return err
	}
	var read []string
	if isNPX {
		// The folder that is printed is the final one, not the stage.
		fmt.Fprintf(cmd.ErrOrStderr(), "installing %s in %s\n", pkg, filepath.Join(a.folder, process.NPMFolder))
		command, err := process.InstallNPM(cmd.Context(), a.stage.Dir(), pkg)
		if err != nil {
			return a.explain(err)
		}
		// Node and the arguments get absolute paths. The path of the script stays relative to the folder, so
		// that it is found in the stage now and in the plugin's folder later: it is inserted afterwards.
		m.Command = append(command[:1:1], args...)
		if m.Command, read, err = process.CompleteCommand(m.Command); err != nil {
			return err
		}
		m.Command = slices.Insert(m.Command, 1, command[1])
		// The server runs as the relay's user, who has to read what root has installed.
		if err := a.stage.GiveTo(process.OwnerOf(a.pluginDir)); err != nil {
			return err
		}
	} else if m.Command, read, err = process.CompleteCommand(m.Command); err != nil {
		return cli.Errorf(cli.ExitUsage, "%w", err)
	}
	for _, path := range read {
		// What may be written may be read too.
		if !slices.Contains(m.Sandbox.Write, path) {
			addPath(&m.Sandbox.Read, path)
		}
	}
	return nil
}

// explain adds to an error of the installation or of the server what the server wrote to stderr, which is
// where most of them say what is missing, and the next step. The server wrote both texts: SafeText replaces
// what could control the terminal.
func (a *adoption) explain(err error) error {
	e, ok := errors.AsType[*process.AdoptError](err)
	// Other errors, such as a full disk, are not the server's, and more permissions do not help.
	if !ok {
		return fmt.Errorf("adopt %s: %w", a.name, err)
	}
	text := fmt.Sprintf("adopt %s: %s", a.name, term.SafeText(e.Error()))
	if e.Stderr != "" {
		text += "\nIt wrote:\n  " + strings.ReplaceAll(term.SafeText(e.Stderr), "\n", "\n  ")
	}
	return errors.New(text + "\nIf it needs more of this machine, give it that with --read PATH, --write PATH or --env NAME=VALUE")
}

// finish shows the manifest, writes it unless it would replace another one, and loads it. A manifest that
// is the same as the one that is there is written again: the program beside it may be a newer one.
func (a *adoption) finish(cmd *cobra.Command, found *process.Adoption) error {
	// Bytes are compared and not values, because writing would lose any edit by hand.
	isSame := bytes.Equal(a.previousJSON, found.JSON)
	r := newAdoptReport(a, found)
	r.relayFlags += cli.GivenFlags(cmd, "relay", "ca-file", "ca-sha256")
	if a.previousJSON != nil && !isSame {
		r.Diff = string(diff.Diff("plugin.json", a.previousJSON, "plugin.json (new)", found.JSON))
	}
	switch {
	case a.previousJSON != nil && !isSame && !a.again:
		if err := a.out.Print(cmd, r, func() error { return r.print(cmd) }); err != nil {
			return err
		}
		// The report is complete; the exit code says that nothing was written.
		return cli.Errorf(cli.ExitFailure, "%s exists and differs; review the difference, then replace it with: agentctl plugin adopt %s --again%s -- COMMAND", filepath.Join(a.folder, "plugin.json"), a.name, cli.GivenFlags(cmd, "state-dir", "plugin-dir"))
	case !a.dryRun:
		if err := process.WriteFolder(a.folder, a.stage, found.JSON); err != nil {
			return err
		}
		r.Written = true
		if err := a.load(cmd.Context(), r); err != nil {
			_ = a.out.Print(cmd, r, func() error { return r.print(cmd) }) // the operator reviews what is written now, loaded or not
			return err
		}
	}
	return a.out.Print(cmd, r, func() error { return r.print(cmd) })
}

// load loads the plugin into the relay that runs, if the flags have a token. Without one, the report
// names the command: an operator may want to review the manifest first. After an error the plugin that was
// loaded before goes on.
func (a *adoption) load(ctx context.Context, r *adoptReport) error {
	if a.relay.TokenFile == "" {
		return nil
	}
	rc, err := a.relay.Client()
	if err != nil {
		return err
	}
	// A plugin that is loaded is replaced in one step, by the same rules as with plugin reload.
	plugins, err := rc.Plugins(ctx)
	load := rc.LoadPlugin
	if slices.ContainsFunc(plugins, func(p client.Plugin) bool { return p.Name == a.name }) {
		load = rc.ReloadPlugin // no call fails meanwhile
	}
	if err == nil {
		err = load(ctx, a.name)
	}
	if err != nil {
		return fmt.Errorf("%s is written, and not loaded: %w", a.folder, err)
	}
	r.Loaded = true
	return nil
}
