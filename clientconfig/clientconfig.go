// Package clientconfig adds agentctl to the configuration files of MCP clients, and removes it.
//
//	c, err := clientconfig.Find("cursor")
//	path, err := c.Path(clientconfig.ThisSystem())
//	f, err := clientconfig.Read(path)
//	after, err := c.Connect(f.Data, server)
//	fmt.Print(f.Diff(after))
//	err = f.Write(after) // what it held before is at f.BackupPath()
//
// Edits keep the rest of a file byte for byte, comments and order included: it is the work of a person, and
// some clients keep their state in it. After an edit both texts are decoded and compared; one that would
// change the meaning of anything but the entry is refused.
//
// There are three formats and one way to edit each, chosen so that nothing is rewritten:
//
//	JSON   as a syntax tree that keeps white space and comments
//	TOML   by whole lines, since no library writes a tree as it was read
//	YAML   not at all: the only client that has it gets a text to paste
//
//	clients.go  the clients: where each has its file, and the form of its entries (entries.go)
//	file.go     reads and writes a file safely, and shows the change
//	json.go     edits JSON with comments; toml.go TOML by lines; yaml.go only prints
package clientconfig

import (
	"errors"
	"fmt"
	"slices"
	"strings"
)

// EntryName is the name of the server in every client's file. It is fixed, so that Connect and Disconnect
// find the entry of an earlier version.
const EntryName = "agentctl"

// Server is what a client connects to: a program that it starts, or a URL. It holds no secret, because
// people sync the files of clients between machines and paste them into bug reports.
type Server struct {
	Command string   // absolute path of the program
	Args    []string // of the program
	Env     []EnvVar // that the program needs and some clients do not pass on; not for secrets

	URL      string // in place of Command: the relay's MCP endpoint
	TokenEnv string // with URL: the client's environment variable that holds the token
}

// EnvVar is a variable of the environment.
type EnvVar struct{ Name, Value string }

// Errors of edits, which callers test with errors.Is.
var (
	// ErrNoHTTP reports a client that cannot take a header from its environment: it would need
	// the token in its file.
	ErrNoHTTP = errors.New("the client cannot take the token of an HTTP server from its environment")
	// ErrSyntax reports a file that is not of the client's format.
	ErrSyntax = errors.New("the file is damaged")
	// ErrShape reports a file of the right format whose entries are not where the client
	// documents them, or in a form that cannot be edited without rewriting it.
	ErrShape = errors.New("the file has another structure than the client documents")
)

// format is the syntax of a client's file.
type format int

const (
	formatJSON format = iota // with or without comments
	formatTOML
	formatYAML // printed only
)

// field is a key of an entry. value is a string, a bool, an int, a []string or a []EnvVar, which the file has
// as an object of strings. Fields are a slice and not a map, so that each client gets the order that its
// documentation shows.
type field struct {
	key   string
	value any
}

// Client is an MCP client whose file is known. Its methods do not change it, and touch no file: they turn the
// content of one into the next. File reads and writes.
type Client struct {
	Name     string // as typed on the command line
	Title    string // as its makers write it
	Writable bool   // Connect and Disconnect are supported; Snippet always is
	Restart  string // what makes the client read the file, for people

	format    format
	container string               // the key of the root that holds all servers by name
	path      func(System) string  // of the user's file, not of a project's
	stdio     func(Server) []field // the entry of a program
	http      func(Server) []field // the entry of a URL; nil: ErrNoHTTP
	// owned are the keys that Connect sets, or removes where the entry has no such key: those of the other
	// kind of server. All other keys of an entry are the user's and stay. Connect sets env too where the
	// server has variables, but never removes it, and keeps the variables and headers that are not ours.
	owned []string
}

// UnknownError reports a name that is not one of a client. Its text lists the names there are.
type UnknownError struct{ Name string }

func (e *UnknownError) Error() string {
	return fmt.Sprintf("not a known client: %.40q (one of %s)", e.Name, strings.Join(Names(false), ", "))
}

// Find returns the client with a name.
func Find(name string) (*Client, error) {
	if i := slices.IndexFunc(clients, func(c *Client) bool { return c.Name == name }); i >= 0 {
		return clients[i], nil
	}
	return nil, &UnknownError{name}
}

// Names returns the names of the clients, or only of those that are writable.
func Names(writable bool) []string {
	var names []string
	for _, c := range clients {
		if c.Writable || !writable {
			names = append(names, c.Name)
		}
	}
	return names
}

// Path returns where the client of a user has its file, whether it exists or not. An error
// reports a system that names no home directory, where a relative path would be written into the
// working directory.
func (c *Client) Path(s System) (string, error) {
	if s.Home == "" {
		return "", errors.New("the environment names no home directory")
	}
	return c.path(s), nil
}

// entry returns the fields of the entry in the client's file.
func (c *Client) entry(s Server) ([]field, error) {
	switch {
	case s.URL == "":
		return c.stdio(s), nil
	case c.http == nil:
		return nil, ErrNoHTTP
	}
	return c.http(s), nil
}

// Snippet returns a file that has nothing but the entry, to be pasted into the client's file by hand. It is
// made by the code of Connect, so that both have the same form.
func (c *Client) Snippet(s Server) ([]byte, error) {
	entry, err := c.entry(s)
	if err != nil {
		return nil, err
	}
	switch c.format {
	case formatTOML:
		return setTOML(nil, c.container, entry, c.owned)
	case formatYAML:
		return yamlSnippet(c.container, entry)
	}
	return setJSON(nil, c.container, entry, c.owned)
}

// Connect returns the file's content with the entry for a server; data is nil for a file that
// does not exist. Data itself is returned when the file has the entry. Keys that the user added
// to an existing entry stay.
func (c *Client) Connect(data []byte, s Server) ([]byte, error) {
	entry, err := c.entry(s)
	if err != nil {
		return nil, err
	}
	if c.format == formatTOML {
		return setTOML(data, c.container, entry, c.owned)
	}
	return setJSON(data, c.container, entry, c.owned)
}

// Disconnect returns the file's content without the entry, and data itself if there is none.
func (c *Client) Disconnect(data []byte) ([]byte, error) {
	if c.format == formatTOML {
		return removeTOML(data, c.container)
	}
	return removeJSON(data, c.container)
}
