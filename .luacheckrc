-- Rules for the functions that run in the store (Lua 5.1): make lint. A file reads what another one exports under its name.
std = 'lua51'
max_line_length = 128
read_globals = { 'redis', 'cmsgpack', 'struct', 'bit', 'TAG' }

local function reads(folder, modules)
  files[folder] = { read_globals = modules }
end

reads('kvatlas/index/redis/functions', {
  '_register', '_slot', '_holders', '_blocks', '_marks', '_resume', '_fold', '_apply', '_worker_state',
})
reads('kvatlas/reservations/functions', {
  '_clock', '_layout', '_orders', '_pool', '_register', '_pair_choice', '_evaluation', '_look_alikes', '_choice',
})
reads('kvatlas/fleet_store/functions', { '_register', '_clock', '_leases' })
