export const Routers = () => null;
