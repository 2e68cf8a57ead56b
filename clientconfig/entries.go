package clientconfig

import "fmt"

// stdioFields is the entry of a program, as most clients have it. env is left out where it is empty, because
// an entry that a person wrote may have one.
func stdioFields(s Server) []field {
	fields := []field{{"command", s.Command}, {"args", s.Args}}
	if len(s.Env) > 0 {
		fields = append(fields, field{"env", s.Env})
	}
	return fields
}

// headerFields returns the entry of a URL whose Authorization header takes the token from the
// client's environment. variable is how the client writes a variable, with %s for its name: the client puts
// the token in its place, so that the file holds none.
func headerFields(urlKey, variable string) func(Server) []field {
	return func(s Server) []field {
		header := EnvVar{"Authorization", "Bearer " + fmt.Sprintf(variable, s.TokenEnv)}
		return []field{{urlKey, s.URL}, {"headers", []EnvVar{header}}}
	}
}

// withType puts a field "type" before the others, for clients that tell a program from a URL by it.
func withType(name string, fields func(Server) []field) func(Server) []field {
	return func(s Server) []field { return append([]field{{"type", name}}, fields(s)...) }
}

// gooseTimeout is how long goose waits for a tool, in seconds: goose's default.
const gooseTimeout = 300

// gooseFields is the entry of a program in goose, whose keys differ from those of other clients: cmd and envs.
func gooseFields(s Server) []field {
	fields := []field{{"enabled", true}, {"type", "stdio"}, {"name", EntryName},
		{"description", "Boards and their relay"}, {"cmd", s.Command}, {"args", s.Args}, {"timeout", gooseTimeout}}
	if len(s.Env) > 0 {
		fields = append(fields, field{"envs", s.Env})
	}
	return fields
}

// varFields returns variables as the fields of an object.
func varFields(vars []EnvVar) []field {
	fields := make([]field, len(vars))
	for i, v := range vars {
		fields[i] = field{v.Name, v.Value}
	}
	return fields
}

// keys returns the keys of an entry in their order.
func keys(entry []field) []string {
	list := make([]string, len(entry))
	for i, f := range entry {
		list[i] = f.key
	}
	return list
}
