//go:build linux && !agentctl_omit_relay

package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/rogpeppe/go-internal/diff"
	"github.com/spf13/cobra"

	"agentctl/atomicfile"
	"agentctl/client"
	"agentctl/relay/plugins/process"
	"agentctl/term"
)

// prepare makes the command one that starts without the network and from any directory. A package of
// npx is installed in a folder beside the plugin's, which replaces what was there at the end.
func (a *adoption) prepare(cmd *cobra.Command, m *process.PluginManifest) error {
	pkg, args, isNPX, err := process.NPXPackage(m.Command)
	if err != nil {
		return exit(exitUsage, "%w", err)
	}
	if err := atomicfile.MkdirAll(a.pluginDir, 0o755); err != nil {
		return err
	}
	removeStaleStages(a.pluginDir)
	if a.stage, err = os.MkdirTemp(a.pluginDir, stagePrefix); err != nil {
		return err
	}
	if err := os.Chmod(a.stage, 0o755); err != nil {
		return err
	}
	var read []string
	if isNPX {
		fmt.Fprintf(cmd.ErrOrStderr(), "installing %s in %s\n", pkg, filepath.Join(a.folder, process.NPMFolder))
		command, err := process.InstallNPM(cmd.Context(), a.stage, pkg)
		if err != nil {
			return a.explain(err)
		}
		m.Command = append(command[:1:1], args...) // the script is added below: its path is one of the stage
		if m.Command, read, err = process.CompleteCommand(m.Command); err != nil {
			return err
		}
		m.Command = slices.Insert(m.Command, 1, command[1])
		if err := giveTo(ownerOf(a.pluginDir), a.stage); err != nil {
			return err
		}
	} else if m.Command, read, err = process.CompleteCommand(m.Command); err != nil {
		return exit(exitUsage, "%w", err)
	}
	for _, path := range read {
		if !slices.Contains(m.Sandbox.Write, path) {
			addPath(&m.Sandbox.Read, path)
		}
	}
	return nil
}

// A folder in which a server is installed, beside the plugins. One that is older than an
// installation may take was left behind by a process that was killed.
const (
	stagePrefix = ".adopt-"
	staleStage  = time.Hour
)

// removeStaleStages removes the folders that killed processes left behind.
func removeStaleStages(pluginDir string) {
	stages, _ := filepath.Glob(filepath.Join(pluginDir, stagePrefix+"*"))
	for _, stage := range stages {
		if st, err := os.Lstat(stage); err == nil && time.Since(st.ModTime()) > staleStage {
			_ = os.RemoveAll(stage)
		}
	}
}

// giveTo makes a user the owner of dir, which this process made, and of all that is in it: as this
// user the relay can replace and remove it later. nil is the user of this process. That user can
// replace dir by another one meanwhile, so nothing is changed in one that this process did not
// make, and a folder becomes the user's after all that is in it.
func giveTo(user *syscall.Credential, dir string) error {
	if user == nil {
		return nil
	}
	root, err := os.OpenRoot(dir)
	if err != nil {
		return err
	}
	defer func() { _ = root.Close() }()
	if st, err := root.Stat("."); err != nil {
		return err
	} else if sys, ok := st.Sys().(*syscall.Stat_t); !ok || int(sys.Uid) != os.Geteuid() {
		return fmt.Errorf("%s was replaced by another folder", dir)
	}
	var paths []string
	err = fs.WalkDir(root.FS(), ".", func(path string, _ fs.DirEntry, err error) error {
		paths = append(paths, path)
		return err
	})
	if err != nil {
		return err
	}
	for _, path := range slices.Backward(paths) {
		if err := root.Lchown(path, int(user.Uid), int(user.Gid)); err != nil {
			return err
		}
	}
	return nil
}

// ownerOf returns the user that the relay runs as, if this process is root's and may become that user.
func ownerOf(dir string) *syscall.Credential {
	st, err := os.Stat(dir)
	if err != nil || os.Geteuid() != 0 {
		return nil
	}
	sys, ok := st.Sys().(*syscall.Stat_t)
	if !ok || sys.Uid == 0 {
		return nil
	}
	return &syscall.Credential{Uid: sys.Uid, Gid: sys.Gid}
}

// explain adds what the server wrote, and the next step.
func (a *adoption) explain(err error) error {
	e, ok := errors.AsType[*process.AdoptError](err)
	if !ok {
		return fmt.Errorf("adopt %s: %w", a.name, err)
	}
	text := fmt.Sprintf("adopt %s: %s", a.name, term.SafeText(e.Error()))
	if e.Stderr != "" {
		text += "\nIt wrote:\n  " + strings.ReplaceAll(term.SafeText(e.Stderr), "\n", "\n  ")
	}
	return errors.New(text + "\nIf it needs more of this machine, give it that with --read PATH, --write PATH or --env NAME=VALUE")
}

// finish shows the manifest, writes it unless it would replace another one, and loads it.
func (a *adoption) finish(cmd *cobra.Command, found *process.Adoption) error {
	isSame := bytes.Equal(a.old, found.JSON)
	r := newAdoptReport(a, found)
	if a.old != nil && !isSame {
		r.Diff = string(diff.Diff("plugin.json", a.old, "plugin.json (new)", found.JSON))
	}
	switch {
	case a.old != nil && !isSame && !a.again:
		if err := a.out.print(cmd, r, func() error { return r.print(cmd) }); err != nil {
			return err
		}
		return exit(exitFailure, "%s exists and differs; review the difference, then replace it with: agentctl plugin adopt %s --again -- COMMAND", filepath.Join(a.folder, "plugin.json"), a.name)
	case !a.dryRun:
		if err := a.install(found.JSON); err != nil {
			return err
		}
		r.Written = true
		if err := a.load(cmd.Context(), r); err != nil {
			_ = r.print(cmd)
			return err
		}
	}
	return a.out.print(cmd, r, func() error { return r.print(cmd) })
}

// install writes the plugin's folder.
func (a *adoption) install(manifest []byte) error {
	if err := atomicfile.MkdirAll(a.folder, 0o755); err != nil {
		return err
	}
	server := filepath.Join(a.folder, process.NPMFolder)
	if from := filepath.Join(a.stage, process.NPMFolder); a.stage != a.folder {
		if _, err := os.Stat(from); err == nil {
			// Two renames, because removing the old one takes longer: a process that is killed meanwhile
			// would leave a part of it.
			old := filepath.Join(a.stage, "old")
			if err := os.Rename(server, old); err != nil && !errors.Is(err, os.ErrNotExist) {
				return err
			}
			if err := os.Rename(from, server); err != nil {
				_ = os.Rename(old, server)
				return err
			}
		}
	}
	return atomicfile.ReplaceMode(filepath.Join(a.folder, "plugin.json"), manifest, 0o644)
}

// load loads the plugin if the flags have a token.
func (a *adoption) load(ctx context.Context, r *adoptReport) error {
	if a.relay.tokenFile == "" {
		return nil
	}
	rc, err := a.relay.client()
	if err != nil {
		return err
	}
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
